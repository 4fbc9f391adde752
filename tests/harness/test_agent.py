from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.agent import Agent, RankJob, sigterm_exits
from harness.culprit import Outcome
from harness.forkserver import ForkServer, ForkServerError, server_environment
from harness.rank_report import RankReport, read_reports

ENTRIES = "tests.harness.rank_entries"
CPU_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1152921504606846976 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with Agent(preload=(ENTRIES,)) as agent:
        yield agent


def _job(folder: Path, entry: str, payload: Any = None, *, ranks: int = 1, **fields: Any) -> RankJob:
    return RankJob(
        trial_dir=folder,
        entry=f"{ENTRIES}:{entry}",
        payload=payload,
        ranks=ranks,
        **{"deadline_s": 30.0, **fields},
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_results_come_back_by_rank(agent: Agent, tmp_path: Path, ranks: int) -> None:
    expected = {"payload": {"x": [1]}, "sum": ranks * (ranks + 1) // 2}
    outcome = agent.run(_job(tmp_path, "ok", {"x": [1]}, ranks=ranks))
    assert outcome == Outcome(status="ok", results=(expected,) * ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fault", "status", "kind", "message"),
    [
        ("ValueError", "failed", "ValueError", "the width is odd"),
        ("cuda_oom", "oom", "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        (
            "cpu_oom",
            "oom",
            "RuntimeError",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate",
        ),
        ("MemoryError", "oom", "MemoryError", ""),
        (
            "SIGKILL",
            "failed",
            "SIGKILL",
            "was killed by SIGKILL; the kernel sends it when memory is exhausted",
        ),
        ("SIGSEGV", "failed", "SIGSEGV", "was killed by SIGSEGV"),
        ("exit 5", "failed", "exit 5", "exited with status 5 and without a result"),
        ("exit 0", "failed", "exit 0", "exited with status 0 and without a result"),
        ("SystemExit", "failed", "SystemExit", "no more"),
    ],
    ids=lambda value: value[:12] or "no message",
)
def test_a_fault_names_its_rank_and_not_the_peer_that_lost_it(
    agent: Agent, tmp_path: Path, ranks: int, fault: str, status: str, kind: str, message: str
) -> None:
    outcome = agent.run(_job(tmp_path, "fault", fault, ranks=ranks))
    assert outcome.status == status
    assert outcome.error is not None
    assert message in outcome.error.message
    assert asdict(outcome.error) | {"message": ""} == {
        "kind": kind,
        "message": "",
        "rank": ranks - 1,
        "phase": "parity",
        "log": f"rank{ranks - 1}.log",
    }


@pytest.mark.parametrize(
    ("entry", "payload", "ranks"),
    [
        pytest.param("fault", "hang", 1, id="alone"),
        pytest.param("fault", "hang", 2, id="while its peer waits"),
        pytest.param("fault", "deaf", 1, id="deaf to SIGTERM"),
        pytest.param("late_hang", None, 2, id="while its peer has been silent for longer"),
    ],
)
def test_a_hang_ends_at_the_deadline_and_names_its_rank(
    agent: Agent, tmp_path: Path, entry: str, payload: str | None, ranks: int
) -> None:
    started_s = time.monotonic()
    outcome = agent.run(_job(tmp_path, entry, payload, ranks=ranks, deadline_s=1.0))
    assert time.monotonic() - started_s < 5
    assert outcome.status == "timeout"
    assert outcome.error is not None
    assert outcome.error.rank == ranks - 1
    assert outcome.error.message.startswith("no result within 1 s; rank ")
    assert f"{ENTRIES.replace('.', '/')}.py" in (tmp_path / f"rank{ranks - 1}.log").read_text("utf-8")


def test_the_trial_after_a_fault_is_not_touched_by_it(agent: Agent, tmp_path: Path) -> None:
    assert agent.run(_job(tmp_path, "fault", "ValueError", ranks=2)).status == "failed"
    assert agent.run(_job(tmp_path, "ok")).status == "ok"


def test_an_abort_after_the_result_is_ok(agent: Agent, tmp_path: Path) -> None:
    outcome = agent.run(_job(tmp_path, "abort_after_result", ranks=2))
    assert outcome == Outcome(status="ok", results=({"rank": 0}, {"rank": 1}))


def test_an_early_rank_waits_for_a_late_one(agent: Agent, tmp_path: Path) -> None:
    assert agent.run(_job(tmp_path, "one_late", ranks=2)).status == "ok"


def test_a_result_that_is_no_json_is_a_failure(agent: Agent, tmp_path: Path) -> None:
    outcome = agent.run(_job(tmp_path, "unpicklable_result"))
    assert outcome.error is not None
    assert outcome.error.message == "Object of type Tensor is not JSON serializable"


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        ("no_such_function", "AttributeError", f"module '{ENTRIES}' has no attribute 'no_such_function'"),
        ("", "AttributeError", f"module '{ENTRIES}' has no attribute ''"),
    ],
    ids=["a function that does not exist", "no function"],
)
def test_an_entry_that_cannot_be_found_is_a_failure(
    agent: Agent, tmp_path: Path, entry: str, kind: str, message: str
) -> None:
    error = agent.run(_job(tmp_path, entry)).error
    assert error is not None
    assert (error.kind, error.message, error.phase) == (kind, message, "build")


def test_all_output_goes_to_the_log(agent: Agent, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.log").write_text("of an earlier run", "utf-8")
    agent.run(_job(tmp_path, "talk"))
    assert (tmp_path / "rank0.log").read_text("utf-8") == "from Python\nfrom C\nfrom stderr"
    assert capfd.readouterr() == ("", "")


def test_the_traceback_stands_in_log_and_report(agent: Agent, tmp_path: Path) -> None:
    agent.run(_job(tmp_path, "fault", "ValueError"))
    trace = read_reports(tmp_path)[0].traceback
    assert trace is not None
    assert trace.endswith("ValueError: the width is odd\n")
    assert (tmp_path / "rank0.log").read_text("utf-8") == trace


def test_ranks_find_the_environment_they_are_promised(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "77")
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    outcome = agent.run(_job(tmp_path, "environment", ranks=2, threads_per_rank=1))
    assert outcome.results[1] == {
        "variables": variables,
        "threads": 1,
        "device": "cpu",
        "has_group": True,
        "ignores_ctrl_c": True,
        "main": None,
    }


def test_one_rank_has_no_group_unless_a_backend_is_named(agent: Agent, tmp_path: Path) -> None:
    assert agent.run(_job(tmp_path, "environment")).results[0]["has_group"] is False
    assert agent.run(_job(tmp_path, "environment", backend="gloo")).results[0]["has_group"] is True


def test_a_watcher_sees_progress(agent: Agent, tmp_path: Path) -> None:
    seen: list[Mapping[int, RankReport]] = []
    agent.run(_job(tmp_path, "one_late", ranks=2), watch=seen.append)
    assert {report.state for report in seen[-1].values()} == {"ok"}


def test_two_agents_stand_for_two_nodes(agent: Agent, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    outcomes: dict[int, Outcome] = {}

    def node(rank: int, agent: Agent) -> None:
        job = _job(tmp_path, "ok", ranks=1, world_size=2, node_rank=rank, rendezvous=address)
        outcomes[rank] = agent.run(job)

    with Agent() as other:
        thread = threading.Thread(target=node, args=(1, other))
        thread.start()
        node(0, agent)
        thread.join()
    expected = Outcome(status="ok", results=({"payload": None, "sum": 3},))
    assert outcomes == {0: expected, 1: expected}


def test_the_death_of_the_fork_server_loses_the_trial_and_only_this_one(tmp_path: Path) -> None:
    with Agent() as agent:
        thread = threading.Thread(target=_kill_parent_of_rank, args=(tmp_path,))
        thread.start()
        outcome = agent.run(_job(tmp_path, "linger", str(tmp_path)))
        thread.join()
        assert outcome.status == "lost"
        assert outcome.error is not None
        assert outcome.error.message.endswith("has ended; its ranks were killed with it")
        _require_dead(*_pids(tmp_path, 0))
        assert agent.run(_job(tmp_path, "ok")).status == "ok"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="SIGKILL"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
    ],
)
def test_nothing_outlives_the_driver(tmp_path: Path, number: int, code: int) -> None:
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path)])
    pids = [pid for rank in range(2) for pid in _pids(tmp_path, rank)]
    driver.send_signal(number)
    assert driver.wait(10) == code
    _require_dead(*pids)


_DRIVER = f"""
import sys
from pathlib import Path
from harness.agent import Agent, RankJob, sigterm_exits

folder = sys.argv[1]
job = RankJob(
    trial_dir=Path(folder), entry="{ENTRIES}:linger", payload=folder, ranks=2, deadline_s=60
)
try:
    with sigterm_exits(), Agent() as agent:
        agent.run(job)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_ends_the_ranks_and_is_raised_again(tmp_path: Path) -> None:
    def interrupt(_reports: Mapping[int, RankReport]) -> None:
        if (tmp_path / "pids0").exists():
            raise KeyboardInterrupt

    with Agent() as agent:
        with pytest.raises(KeyboardInterrupt):
            agent.run(_job(tmp_path, "linger", str(tmp_path)), watch=interrupt)
        _require_dead(*_pids(tmp_path, 0))


def test_what_a_rank_started_ends_with_it(agent: Agent, tmp_path: Path) -> None:
    assert agent.run(_job(tmp_path, "linger", str(tmp_path), deadline_s=1.0)).status == "timeout"
    _require_dead(*_pids(tmp_path, 0)[:2])


def test_sigterm_handling_ends_with_its_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, sigterm_exits():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_preload_that_cannot_be_imported_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForkServerError, match=r"fork server \d+: has ended"):
        ForkServer(("no_such_module",))
    assert "ModuleNotFoundError: No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "RankJob.ranks: must be at least 1, got 0"),
        ({"ranks": 2, "world_size": 3}, "RankJob.world_size: must be a multiple of the 2 local ranks, got 3"),
        (
            {"ranks": 2, "world_size": 4},
            "RankJob.rendezvous: several nodes need an address that all of them know, got None",
        ),
    ],
    ids=["no ranks", "ranks that do not fill nodes", "nodes that cannot meet"],
)
def test_an_impossible_job_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(tmp_path, "ok", **fields)


def _pids(folder: Path, rank: int) -> list[int]:
    """Return the process ids of a rank, its child and its parent, as soon as it lingers."""
    path = folder / f"pids{rank}"
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        if path.exists() and len(numbers := path.read_text("utf-8").split()) == 3:
            return [int(number) for number in numbers]
        time.sleep(0.02)
    raise TimeoutError(f"rank {rank} never lingered")


def _kill_parent_of_rank(folder: Path) -> None:
    os.kill(_pids(folder, 0)[2], signal.SIGKILL)


def _require_dead(*pids: int) -> None:
    end_s = time.monotonic() + 5
    alive = set(pids)
    while alive and time.monotonic() < end_s:
        alive = {pid for pid in alive if _is_alive(pid)}
        time.sleep(0.02)
    assert alive == set()


def _is_alive(pid: int) -> bool:
    """Return whether `pid` runs; a zombie that nobody has buried yet does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("users", "spins"),
    [
        pytest.param({}, "10000", id="nothing"),
        pytest.param({"GOMP_SPINCOUNT": "5"}, "5", id="how long to spin"),
        pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, None, id="how to wait"),
    ],
)
def test_openmp_waits_as_the_user_has_decided(
    monkeypatch: pytest.MonkeyPatch, users: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    assert server_environment().get("GOMP_SPINCOUNT") == spins
