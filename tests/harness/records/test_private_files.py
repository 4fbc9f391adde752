"""What a program believes is read from files that nobody else can have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.records.private_files import ForeignFileError, read_private, write_private


def test_a_private_file_has_its_mode_whatever_the_umask_and_whatever_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("of somebody else")
    before = os.umask(0)
    try:
        write_private(path, b"new")
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, read_private(path)) == (0o600, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("mode", "shown"), [(0o660, "0660"), (0o602, "0602"), (0o640, "0640"), (0o604, "0604")]
)
def test_a_file_that_others_can_write_or_read_is_refused(tmp_path: Path, mode: int, shown: str) -> None:
    path = tmp_path / "secret"
    write_private(path, b"")
    path.chmod(mode)
    with pytest.raises(ForeignFileError) as refused:
        read_private(path)
    assert str(refused.value) == f"{path}: must have mode 0600, got {shown}"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_private(path, b"")
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ForeignFileError) as refused:
        read_private(path)
    assert str(refused.value) == f"{path}: must belong to user {own + 1}, who runs this, got {own}"


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    write_private(tmp_path / "there", b"")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(OSError, match="symbolic link"):
        read_private(tmp_path / "link")
    with pytest.raises(ForeignFileError, match="must be a plain file"):
        read_private(tmp_path / "pipe")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_private(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_private(path, b"new")
    assert read_private(path) == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]
