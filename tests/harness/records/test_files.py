"""What is written below a sweep's folder touches no file of others; secrets are read from own files alone."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.records.files import (
    SHARED,
    ForeignFileError,
    clear,
    make_folder,
    new_file,
    opened_lock,
    read_private,
    read_text,
    remove,
    require_writable,
    shorten,
    write_atomically,
    write_once,
)

Write = Callable[[Path, Path], object]


def _new(path: Path, root: Path) -> None:
    with new_file(path, within=root) as file:
        file.write(b"new")


WRITES: dict[str, Write] = {
    "write_atomically": lambda path, root: write_atomically(path, "new", within=root),
    "write_once": lambda path, root: write_once(path, "new", within=root),
    "new_file": _new,
    "opened_lock": lambda path, root: opened_lock(path, within=root).close(),
    "make_folder": lambda path, root: make_folder(path / "below", within=root),
    "remove": lambda path, root: remove(path, within=root),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a file outside of the sweep that must stay as it is."""
    folder = tmp_path / "home"
    folder.mkdir()
    path = folder / "key"
    path.write_text("PRIVATE KEY")
    path.chmod(0o600)
    return path


def _is_as_it_was(victim: Path) -> bool:
    found = victim.stat()
    is_alone = [each.name for each in victim.parent.iterdir()] == ["key"]
    return is_alone and (victim.read_text(), found.st_mode & 0o777, found.st_nlink) == (
        "PRIVATE KEY",
        0o600,
        1,
    )


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_write_follows_a_link_in_place_of_the_file(tmp_path: Path, victim: Path, write: Write) -> None:
    path = tmp_path / "sweep" / "trial" / "rank0.log"
    path.parent.mkdir(parents=True)
    path.symlink_to(victim)
    try:
        write(path, tmp_path / "sweep")
    except OSError as error:
        assert error.errno in {errno.ELOOP, errno.ENOTDIR}  # noqa: PT017 (some replace the link)
    assert _is_as_it_was(victim)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_write_follows_a_link_to_a_file_that_is_missing(
    tmp_path: Path, victim: Path, write: Write
) -> None:
    path = tmp_path / "sweep" / "trial" / "rank0.log"
    path.parent.mkdir(parents=True)
    path.symlink_to(victim.parent / "authorized_keys")
    try:
        write(path, tmp_path / "sweep")
    except OSError as error:
        assert error.errno in {errno.ELOOP, errno.ENOTDIR}  # noqa: PT017 (some replace the link)
    assert _is_as_it_was(victim)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["key", "new"])
def test_no_write_follows_a_link_in_place_of_a_folder(
    tmp_path: Path, victim: Path, write: Write, name: str
) -> None:
    trial = tmp_path / "sweep" / "trial"
    trial.parent.mkdir()
    trial.symlink_to(victim.parent)
    with pytest.raises(OSError, match="is a symbolic link, which is not followed") as refused:
        write(trial / name, tmp_path / "sweep")
    assert str(refused.value) == (
        f"[Errno 40] is a symbolic link, which is not followed in the folder of a sweep: {str(trial)!r}"
    )
    assert _is_as_it_was(victim)


@pytest.mark.parametrize("write", ["write_atomically", "new_file", "remove"])
def test_no_write_goes_through_another_name_of_a_file(tmp_path: Path, victim: Path, write: str) -> None:
    path = tmp_path / "sweep" / "rank0.log"
    path.parent.mkdir()
    os.link(victim, path)
    WRITES[write](path, tmp_path / "sweep")
    assert _is_as_it_was(victim)


def test_a_folder_that_is_a_link_is_not_cleared(tmp_path: Path, victim: Path) -> None:
    trial = tmp_path / "sweep" / "trial"
    trial.parent.mkdir()
    trial.symlink_to(victim.parent)
    with pytest.raises(OSError, match="is a symbolic link"):
        clear(trial, within=tmp_path / "sweep")
    assert _is_as_it_was(victim)


def test_clearing_removes_links_and_not_what_they_lead_to(tmp_path: Path, victim: Path) -> None:
    trial = tmp_path / "trial"
    (trial / "folder").mkdir(parents=True)
    (trial / "folder" / "link").symlink_to(victim.parent)
    (trial / "link").symlink_to(victim)
    (trial / "kept").touch()
    clear(trial, but={"kept", "folder"})
    assert [each.name for each in trial.iterdir()] == ["kept"]
    assert _is_as_it_was(victim)


def test_the_way_to_the_sweep_may_have_links(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "scratch")
    root = tmp_path / "outputs" / "sweep"
    make_folder(root / "trial", within=root)
    write_atomically(root / "trial" / "record.json", "new", within=root)
    assert (tmp_path / "scratch" / "sweep" / "trial" / "record.json").read_text() == "new"


@pytest.mark.parametrize(
    ("umask", "own", "shared"), [(0o000, 0o600, 0o666), (0o002, 0o600, 0o664), (0o077, 0o600, 0o600)]
)
def test_files_are_for_their_owner_unless_asked(tmp_path: Path, umask: int, own: int, shared: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "own", "")
        write_once(tmp_path / "once", "")
        new_file(tmp_path / "log").close()
        write_atomically(tmp_path / "shared", "", mode=SHARED)
    finally:
        os.umask(before)
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert modes == {"own": own, "once": own, "log": own, "shared": shared}


def test_temporary_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    replace = os.replace

    def noted(source: str, target: str, **folders: int) -> None:
        names.append(source)
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", noted)
    for _ in range(2):
        write_atomically(tmp_path / "record.json", "")
    first, second = names
    assert (len(first), first != second) == (len(".record.json..tmp") + 16, True)


def test_the_first_writer_decides(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_once(tmp_path / "rate", text)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("rate", "first")]


def _cut(count: int) -> str:
    return f"[{count}]"


def test_the_middle_of_a_log_is_cut_out_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    with new_file(path) as log:
        log.write(b"head" + b"." * 92 + b"tail")
        log.flush()
        assert shorten(path, most_bytes=100, note=_cut) == 0
        log.write(b"!")
        log.flush()
        assert shorten(path, most_bytes=100, note=_cut) == 51
        log.write(b" and on")
    assert path.read_text() == "head" + "." * 21 + "[51]" + "." * 20 + "tail! and on"


def test_no_file_of_others_is_cut(tmp_path: Path, victim: Path) -> None:
    """Neither through a link nor by another name."""
    for make in (os.link, os.symlink):
        path = tmp_path / make.__name__
        make(victim, path)
        with contextlib.suppress(OSError):
            assert shorten(path, most_bytes=4, note=_cut) == 0
        path.unlink()
    assert _is_as_it_was(victim)


def test_somebody_who_fills_the_name_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank0.log"
    path.touch()
    monkeypatch.setattr(os, "unlink", lambda *_args, **_words: None)
    with pytest.raises(FileExistsError, match="somebody else makes files of this name"):
        new_file(path)


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    require_writable(tmp_path / "sweep")
    assert list((tmp_path / "sweep").iterdir()) == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(os.mkfifo, "is no file", id="a pipe"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "is no file", id="a device"),
        pytest.param(Path.mkdir, "is no file", id="a folder"),
        pytest.param(lambda path: path.write_text("12345"), "is larger than 3.8147e-06 MiB", id="too long"),
    ],
)
def test_what_is_read_is_a_plain_file_up_to_a_limit(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(ValueError, match=f"^{reason}$"):
        read_text(tmp_path / "file", 4)


def test_a_private_file_has_its_mode_whatever_the_umask_and_whatever_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("of somebody else")
    before = os.umask(0)
    try:
        write_atomically(path, b"new")
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, read_private(path)) == (0o600, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("mode", "shown"), [(0o660, "0660"), (0o602, "0602"), (0o640, "0640"), (0o604, "0604")]
)
def test_a_file_that_others_can_write_or_read_is_refused(tmp_path: Path, mode: int, shown: str) -> None:
    path = tmp_path / "secret"
    write_atomically(path, b"")
    path.chmod(mode)
    with pytest.raises(ForeignFileError) as refused:
        read_private(path)
    assert str(refused.value) == f"{path}: must have mode 0600, got {shown}"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_atomically(path, b"")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ForeignFileError) as refused:
        read_private(path)
    assert str(refused.value) == f"{path}: must belong to user {own + 1}, who runs this, got {own}"


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    write_atomically(tmp_path / "there", b"")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OSError, match="symbolic link"):
        read_private(tmp_path / "link")
    with pytest.raises(ForeignFileError, match="must be a plain file"):
        read_private(tmp_path / "pipe")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_atomically(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert read_private(path) == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
