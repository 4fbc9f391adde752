from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.records.files import write_atomically
from harness.records.record import refused
from harness.records.store import LOCK, MARKER, Store, check_name, parsed, trial_id
from tests.harness.composing import ROOT
from tests.harness.records_fixture import STARTED, experiment, failed, identity, record

TRIAL = "0" * 12
HOSTILE = [
    pytest.param("two words", id="space"),
    pytest.param("größe ✓ 模型", id="unicode"),
    pytest.param("""it's "quoted" $HOME `x` *""", id="shell characters"),
    pytest.param("-rf", id="leading dash"),
    pytest.param("a=b,c;d&e|f<g>h", id="Hydra and shell separators"),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sweep")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_is_read_as_it_was_written_whatever_the_sweep_is_called(tmp_path: Path, name: str) -> None:
    check_name(name)
    store = Store(tmp_path / name)
    written = record(name=name)
    path = store.write(written)
    assert path == tmp_path / name / written.trial_id / "record.json"
    assert store.read(written.trial_id) == written
    assert store.scan().records == (written,)


def test_an_empty_sweep_has_no_records(store: Store) -> None:
    assert (store.scan().records, store.scan().unreadable) == ((), ())


def test_a_new_record_replaces_the_old_one_and_leaves_nothing_else(store: Store) -> None:
    store.write(failed("timeout"))
    path = store.write(record())
    assert store.read(record().trial_id) == record()
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"


def test_preparing_clears_what_an_earlier_attempt_left_but_no_finished_record(store: Store) -> None:
    path = store.write(record())
    for name in ("rank0.json", "rank0.log", ".record.json.12.tmp", MARKER, LOCK):
        (path.parent / name).write_text("old")
    (path.parent / "trace").mkdir()
    (path.parent / "trace" / "file").write_text("old")
    assert store.prepare(record().trial_id) == path.parent
    assert sorted(each.name for each in path.parent.iterdir()) == [LOCK, MARKER, "record.json"]
    assert store.read(record().trial_id) == record()


@pytest.mark.parametrize(
    ("status", "is_finished"),
    [
        ("ok", True),
        ("oom", True),
        ("refused", True),
        ("failed", False),
        ("timeout", False),
        ("lost", False),
    ],
)
def test_what_counts_as_finished(store: Store, status: str, is_finished: bool) -> None:
    written = {
        "ok": record,
        "refused": lambda: refused(identity(), "no", at=STARTED),
    }.get(status, lambda: failed(status))()
    store.write(written)
    assert store.finished(written.trial_id, written.environment_id) == (written if is_finished else None)


@pytest.mark.parametrize("trial", ["aaaaaaaaaaaa", None], ids=["a trial", "the sweep"])
def test_a_lock_is_held_against_others_until_its_block_ends(store: Store, trial: str | None) -> None:
    for _ in range(2):
        with store.locked(trial) as is_held:
            assert is_held
            if trial is not None:
                store.prepare(trial)
            with store.locked(trial) as is_held_too:
                assert not is_held_too
            with store.locked("bbbbbbbbbbbb") as is_other_held:
                assert is_other_held


def test_the_lock_of_a_killed_process_is_free(store: Store) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from harness.records.store import Store\n"
        "with Store(Path(sys.argv[1])).locked('aaaaaaaaaaaa') as is_held:\n"
        "    os.kill(os.getpid(), signal.SIGKILL if is_held else signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(store.root)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    with store.locked("aaaaaaaaaaaa") as is_held:
        assert is_held


def test_refuses_a_root_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        Store(tmp_path / "file" / "sweep").require_writable()
    root = str(tmp_path / "file" / "sweep")
    assert str(caught.value) == f"outputs_dir: cannot write {root!r}: Not a directory"


def test_a_root_that_can_be_written_is_made_and_left_empty(store: Store) -> None:
    store.require_writable()
    assert list(store.root.iterdir()) == []


def test_another_environment_makes_no_trial_unnecessary(store: Store) -> None:
    store.write(record())
    assert store.finished(record().trial_id, "ffffffffffff") is None


def test_a_trial_without_a_record_is_not_finished(store: Store) -> None:
    assert store.finished(record().trial_id, record().environment_id) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param("", "Expecting value: line 1 column 1 (char 0)", id="empty"),
        pytest.param(
            '{"schema_version": 1', "Expecting ',' delimiter: line 1 column 21 (char 20)", id="torn"
        ),
        pytest.param(
            '{"schema_version": 7}', "record.schema_version: must be 1, got 7", id="another version"
        ),
        pytest.param("{}", "record.schema_version: must be 1, got None", id="foreign"),
    ],
)
def test_torn_and_foreign_records_are_skipped_and_named(store: Store, content: str, reason: str) -> None:
    store.write(record())
    torn = store.prepare("aaaaaaaaaaaa") / "record.json"
    torn.write_text(content)
    scan = store.scan()
    assert scan.records == (record(),)
    assert [(each.path, each.reason) for each in scan.unreadable] == [(torn, reason)]
    assert store.finished("aaaaaaaaaaaa", record().environment_id) is None


def test_a_record_in_another_trials_folder_is_foreign(store: Store) -> None:
    text = store.write(record()).read_text()
    (store.prepare("aaaaaaaaaaaa") / "record.json").write_text(text)
    (found,) = store.scan().unreadable
    assert found.reason == f"record.trial_id: must be 'aaaaaaaaaaaa' as its folder, got '{record().trial_id}'"


def test_folders_that_are_no_trials_are_left_alone(store: Store) -> None:
    store.write(record())
    (store.root / "wandb").mkdir()
    (store.root / "wandb" / "record.json").write_text("theirs")
    assert store.scan().unreadable == ()


def test_a_trial_id_is_written_down() -> None:
    assert (
        trial_id({"ac": {"name": "full", "ac_freq": 2}, "learning_rate": 0.001, "seed": 0}) == "c3f25ed87b45"
    )


SAME = {"ac": {"name": "full", "ac_freq": 2}, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            {"learning_rate": 0.001, "ac": {"ac_freq": 2, "name": "full"}}, id="another order of keys"
        ),
        pytest.param(SAME | {"name": "sweep"}, id="another sweep"),
        pytest.param(SAME | {"tracker": {"name": "none"}}, id="another tracker"),
        pytest.param(SAME | {"launcher": "slurm"}, id="another launcher"),
    ],
)
def test_what_does_not_change_a_trial_does_not_change_its_id(other: dict[str, object]) -> None:
    assert trial_id(other) == trial_id(SAME)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(SAME | {"seed": 0}, id="another field"),
        pytest.param(SAME | {"learning_rate": 0.0010000000000000002}, id="the next float"),
        pytest.param(SAME | {"ac": {"name": "full", "ac_freq": 3}}, id="another option"),
    ],
)
def test_what_changes_a_trial_changes_its_id(other: dict[str, object]) -> None:
    assert trial_id(other) != trial_id(SAME)


def test_an_experiment_holds_only_finite_numbers() -> None:
    with pytest.raises(ValueError, match=r"^Out of range float values are not JSON compliant"):
        trial_id({"learning_rate": float("nan")})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("", "name: must name a folder below outputs_dir, got ''", id="empty"),
        pytest.param("  ", "name: must name a folder below outputs_dir, got '  '", id="blank"),
        pytest.param("..", "name: must name a folder below outputs_dir, got '..'", id="parent"),
        pytest.param(
            "a/b", "name: must hold no path separator and no control character, got 'a/b'", id="separator"
        ),
        pytest.param(
            "a\\b",
            "name: must hold no path separator and no control character, got 'a\\\\b'",
            id="the other separator",
        ),
        pytest.param(
            "a\nb",
            "name: must hold no path separator and no control character, got 'a\\nb'",
            id="control character",
        ),
        pytest.param("ä" * 128, "name: must be at most 255 bytes, got 256", id="too long"),
    ],
)
def test_names_that_are_no_folder_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name(name)
    assert str(caught.value) == message


def test_another_trial_has_another_folder(store: Store) -> None:
    ids = {trial_id(experiment(ac)) for ac in ("none", "full", "offload")}
    assert len({store.trial_dir(each) for each in ids}) == 3


def test_a_folder_in_the_place_of_a_record_gives_way(store: Store) -> None:
    store.record_path(TRIAL).mkdir(parents=True)
    (store.record_path(TRIAL) / "x").touch()
    assert store.finished(TRIAL, "0123456789ab") is None
    written = replace(record(), trial_id=TRIAL)
    store.write(written)
    assert store.read(TRIAL) == written


@pytest.mark.parametrize(("place", "full"), [(os, "fsync"), (os, "replace")], ids=["fsync", "replace"])
def test_a_full_disk_leaves_the_old_record_and_nothing_beside_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, place: object, full: str
) -> None:
    old = replace(record(), trial_id=TRIAL)
    store.write(old)

    def no_space(*_arguments: object, **_folders: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, full, no_space)
    with pytest.raises(OSError, match="No space left"):
        store.write(replace(old, name="new"))
    assert store.read(TRIAL) == old
    assert [path.name for path in store.trial_dir(TRIAL).iterdir()] == ["record.json"]


def test_the_lock_of_another_user_is_held_by_reading_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write any file, and so may these tests: the system's refusal is played."""
    with store.locked(TRIAL):
        pass
    opened = os.open

    def refuse_to_write(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        if str(path).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse_to_write)
    with store.locked(TRIAL) as first, store.locked(TRIAL) as second:
        assert (first, second) == (True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("9223372036854775808", "an integer must have at most 64 bits", id="65 bits"),
        pytest.param("1" * 5000, "an integer must have at most 64 bits", id="beyond what Python reads"),
        pytest.param("[" * 100_000, "is nested too deep", id="nested"),
    ],
)
def test_values_that_no_program_of_ours_has_written_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(text)
    assert parsed('{"a": 9223372036854775807, "b": "12345678901234567890"}') == {
        "a": 2**63 - 1,
        "b": "12345678901234567890",
    }
