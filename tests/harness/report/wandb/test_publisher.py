from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.records.record import Record
from harness.records.store import MARKER, Store
from harness.report.facts.flat_record import flat_config, flat_summary
from harness.report.wandb.publisher import Published, Tracker, marker_of, publish
from tests.harness.processes import below
from tests.harness.records_fixture import experiment, failed, rank_result, record
from tests.harness.report.wandb.loopback import accepting_server, silent_server
from tests.harness.report.wandb.offline_log import OfflineRun, read_run

OFFLINE = Tracker(name="offline", project="ours", deadline_s=200)
HANGS_S = 80
"""Far more than the deadline of 3 s, less than the 100 s for which wandb waits for a server by itself."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "two words, ünïcode")


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(below(os.getpid()))
    yield
    assert set(below(os.getpid())) <= before


def runs(store: Store) -> dict[str, OfflineRun]:
    paths = (store.root / "wandb").glob("offline-run-*/run-*.wandb")
    return {run.run_id: run for run in map(read_run, paths)}


def with_speed() -> Record:
    result = rank_result()
    result["time"] |= {"variant_s": [0.5, 0.75], "twin_s": [0.25, 0.5]}
    return record(None, result)


_FOREIGN = {"WANDB_MODE": "disabled", "WANDB_RUN_ID": "other", "WANDB_PROJECT": "theirs"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return a store of two records that were published from a shell that belongs to another run."""
    store = Store(tmp_path_factory.mktemp("published") / "two words, ünïcode")
    for each in (with_speed(), failed("oom", experiment("none"))):
        store.write(each)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in _FOREIGN.items():
            patch.setenv(key, value)
        done = publish(store, OFFLINE)
    assert done == Published(published=2, remaining=0, folder=store.root / "wandb", problem=None)
    assert str(done) == f"W&B: 2 published, files in {store.root / 'wandb'}"
    return store


@pytest.fixture(scope="module")
def kept_offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store whose one record was published offline."""
    store = Store(tmp_path_factory.mktemp("kept") / "sweep")
    store.write(record())
    publish(store, OFFLINE)
    return store.root


@pytest.fixture
def offline(kept_offline: Path, store: Store) -> Store:
    """Return a store of this test's own with what an offline sweep leaves."""
    shutil.copytree(kept_offline, store.root)
    return store


def test_one_offline_run_a_trial_equals_its_record(published: Store) -> None:
    found = runs(published)
    records = published.scan().records
    assert set(found) == {each.trial_id for each in records}
    for each in records:
        run = found[each.trial_id]
        assert (run.project, run.group, run.exit_code) == ("ours", "demo", 0)
        assert run.tags == (each.status, each.verdict)
        assert {key: value for key, value in run.config.items() if key != "_wandb"} == flat_config(each)
        assert flat_summary(each).items() <= run.summary.items()
        assert run.artifacts == {f"record-{each.trial_id}": ["record.json"]}


def test_history_and_tables_equal_the_record(published: Store) -> None:
    run = runs(published)[with_speed().trial_id]
    history = [{key: value for key, value in row.items() if not key.startswith("_")} for row in run.history]
    assert [row for row in history if "loss" in row] == [
        {"parity_step": 0, "loss": 5.5},
        {"parity_step": 1, "loss": 5.25},
        {"parity_step": 2, "loss": 5.0},
    ]
    assert [row for row in history if "timed_pair" in row] == [
        {"timed_pair": 0, "variant_step_time_s": 0.5, "twin_step_time_s": 0.25},
        {"timed_pair": 1, "variant_step_time_s": 0.75, "twin_step_time_s": 0.5},
    ]
    assert run.step_metrics == {
        "loss": "parity_step",
        "variant_step_time_s": "timed_pair",
        "twin_step_time_s": "timed_pair",
    }
    tables = {
        name: json.loads(
            next(
                published.root.glob(f"wandb/*{with_speed().trial_id}/files/media/table/{name}_*")
            ).read_text()
        )
        for name in ("blocks", "largest_saved")
    }
    assert tables["blocks"] == {
        "columns": ["module", "saved_bytes", "calls"],
        "data": [["layers.0", 2_097_152, 2], ["layers.1", 1_048_576, 2]],
    }
    assert tables["largest_saved"]["data"][0] == [
        1_048_576,
        "aten.mm.default",
        "layers.0",
        "[8, 128, 256]",
        "float32",
    ]


def test_every_record_is_published_once(store: Store) -> None:
    store.write(record())
    first, again = publish(store, OFFLINE), publish(store, OFFLINE)
    store.write(with_speed())  # the trial ran again
    third = publish(store, OFFLINE)
    assert [each and each.published for each in (first, again, third)] == [1, 0, 1]
    assert len(list((store.root / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"digest": "0", "run_dir": "wandb"}'])
def test_a_torn_or_foreign_marker_counts_for_nothing(store: Store, content: str) -> None:
    path = store.write(record())
    (path.parent / MARKER).write_text(content)
    assert marker_of(store, record().trial_id) is None


def test_no_tracker_starts_no_process(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    store.write(record())
    assert publish(store, Tracker(name="none")) is None
    assert not (store.root / "wandb").exists()


def test_nothing_to_publish_starts_no_process(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    published = publish(store, OFFLINE)
    assert (published and published.published, published and published.problem) == (0, None)


def test_online_sends_what_a_loopback_stub_takes_and_only_once(
    offline: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = offline  # what it holds is sent later
    with accepting_server() as server:
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        online = Tracker(name="online", project="ours", deadline_s=200)
        published, again = publish(store, online), publish(store, online)
        for mark in store.root.glob("wandb/*/*.synced"):  # as after a crash before it was written
            mark.unlink()
        third = publish(store, online)
    assert (third and third.published, third and third.problem) == (1, None)
    assert (published and published.published, published and published.problem) == (1, None)
    assert (again and again.published, again and again.problem) == (0, None)
    (run,) = server.runs
    assert run == record().trial_id
    config = json.loads(server.runs[run]["config"])
    assert {key: config[key]["value"] for key in flat_config(record())} == flat_config(record())
    assert [row["loss"] for row in server.history[run] if "loss" in row] == [5.5, 5.25, 5.0]
    assert f"record-{run}" in server.uploads


@contextmanager
def refusing_server() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def broken_server(breaks_after: int, *, is_malformed: bool) -> Iterator[str]:
    with accepting_server(breaks_after, is_malformed=is_malformed) as server:
        yield server.url


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(refusing_server, id="refuses"),
        pytest.param(lambda: broken_server(2, is_malformed=False), id="dies in the middle of a run"),
        pytest.param(lambda: broken_server(0, is_malformed=True), id="replies what is no JSON"),
    ],
)
def test_a_broken_server_costs_the_deadline_at_most_and_no_record(
    server: Callable[[], AbstractContextManager[str]], offline: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = offline
    (path,) = store.root.glob("*/record.json")
    before = path.read_bytes()
    with server() as url:
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", url)
        started = time.monotonic()
        published = publish(store, Tracker(name="online", project="ours", deadline_s=3))
        took_s = time.monotonic() - started
    assert took_s < HANGS_S
    assert published is not None
    assert published.published == 0
    assert published.problem is not None
    assert path.read_bytes() == before
    assert list(runs(store)) == [record().trial_id]


PLANTED = ("wandb/wandb", "wandb", "wandb/.wandb", ".wandb")


def test_settings_come_from_the_user_and_never_from_the_sweep(
    offline: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever may write to the sweep's folder would choose the server that gets the key, and run code."""
    with accepting_server() as own, accepting_server() as thief:
        for name in PLANTED:
            folder = offline.root / name
            folder.mkdir(exist_ok=True)
            (folder / "settings").write_text(f"[default]\nbase_url = {thief.url}\n")
            (folder / "json.py").write_text("raise SystemExit('a stranger ran')")
        (offline.root / "json.py").write_text("raise SystemExit('a stranger ran')")
        (tmp_path / "settings").write_text(f"[default]\nbase_url = {own.url}\n")
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.delenv("WANDB_BASE_URL", raising=False)
        monkeypatch.chdir(offline.root)
        published = publish(offline, Tracker(name="online", project="ours", deadline_s=100))
    assert published is not None
    assert (published.problem, list(own.runs), thief.requests) == (None, [record().trial_id], 0)


def test_the_folder_of_the_tracker_is_its_owners_alone(store: Store) -> None:
    store.write(record())
    (store.root / "wandb").mkdir()
    (store.root / "wandb").chmod(0o775)
    (store.root / "key").write_text("PRIVATE KEY")
    (store.root / "wandb" / "publisher.log").symlink_to(store.root / "key")
    publish(store, OFFLINE)
    assert (store.root / "key").read_text() == "PRIVATE KEY"
    assert (store.root / "wandb").stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_trackers_folder_is_a_problem(store: Store, tmp_path: Path) -> None:
    store.write(record())
    (tmp_path / "home").mkdir()
    (store.root / "wandb").symlink_to(tmp_path / "home")
    published = publish(store, OFFLINE)
    assert published is not None
    assert published.problem is not None
    assert "is a symbolic link, which is not followed in the folder of a sweep" in published.problem
    assert list((tmp_path / "home").iterdir()) == []


def test_a_full_disk_loses_no_record_and_the_next_call_continues(store: Store) -> None:
    path = store.write(record())
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))  # inherited by what the publisher starts
    try:
        published = publish(store, Tracker(name="offline", project="ours", deadline_s=20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert published is not None
    assert (published.published, published.remaining) == (0, 1)
    assert published.problem is not None
    assert path.read_bytes() == before
    again = publish(store, OFFLINE)
    assert again is not None
    assert (again.published, again.problem) == (1, None)


def test_a_server_that_never_answers_costs_no_more_than_the_deadline(
    offline: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = offline
    with silent_server() as url:
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", url)
        started = time.monotonic()
        published = publish(store, Tracker(name="online", deadline_s=3))
        took_s = time.monotonic() - started
    assert took_s < HANGS_S
    assert published is not None
    assert (published.published, published.remaining) == (0, 1)
    assert published.problem == "the deadline of 3 s passed; the server gave no answer"
    assert list(runs(store)) == [record().trial_id]  # nothing is lost: it can be sent later


def test_without_credentials_the_problem_is_named_and_the_offline_files_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    store.write(record())
    published = publish(store, Tracker(name="online", deadline_s=200))
    folder = store.root / "wandb"
    assert str(published) == (
        f"W&B: 0 published, files in {folder}; 1 not published, the same command tries again: "
        "Error: No API key configured. Use `wandb login` to log in.; "
        f"see {folder / 'publisher.log'}"
    )
    assert list(runs(store)) == [record().trial_id]


def test_a_killed_service_costs_some_runs_and_the_next_call_continues(store: Store) -> None:
    for seed in range(12):
        store.write(record(experiment(seed=seed)))
    killer = threading.Thread(target=_kill_service_after_first_run, args=(store,))
    killer.start()
    published = publish(store, OFFLINE)
    killer.join()
    assert published is not None
    assert published.problem is not None
    assert 1 <= published.published < 12
    again = publish(store, OFFLINE)
    assert again == Published(
        published=12 - published.published, remaining=0, folder=store.root / "wandb", problem=None
    )


def _kill_service_after_first_run(store: Store) -> None:
    while not any(store.root.glob(f"*/{MARKER}")):
        time.sleep(0.005)
    for pid in below(os.getpid()):
        if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_is_a_problem_and_no_error(store: Store) -> None:
    store.write(record())
    (store.root / "wandb").write_text("a file")
    published = publish(store, OFFLINE)
    assert published is not None
    assert (published.published, published.remaining) == (0, 1)
    assert published.problem == f"[Errno 17] File exists: '{store.root / 'wandb'}'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"name": "maybe"},
            "tracker.name: must be one of offline, online, none, trackio, mlflow, got 'maybe'",
            id="name",
        ),
        pytest.param({"deadline_s": 0.5}, "tracker.deadline_s: must be at least 1, got 0.5", id="no time"),
        pytest.param({"project": " "}, "tracker.project: must name a project, got ' '", id="no project"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tracker(**options)
    assert str(caught.value) == message
