from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.ranks import live_ranks
from harness.ranks.agent import Agent, sigterm_exits
from harness.ranks.culprit import Outcome
from harness.ranks.forkserver import ForkServer, ForkServerError, server_environment
from harness.ranks.node_report import Halt
from harness.ranks.rank_report import RankReport, read_reports
from harness.ranks.start import RankJob
from tests.harness.processes import Waiter, has_begun, is_alive, require_dead

ENTRIES = "tests.harness.rank_entries"


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
        **{"deadline_s": 120.0, **fields},
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
    ("trouble", "kind", "message"),
    [
        ("a broken pipe", "OSError", r"\udcff.bin is odd"),
        ("closed streams", "OSError", r"\udcff.bin is odd"),
        ("closed descriptors", "OSError", r"\udcff.bin is odd"),
        ("no stderr", "OSError", r"\udcff.bin is odd"),
        ("no descriptors", "OSError", r"\udcff.bin is odd"),
        ("no folder", "OSError", r"\udcff.bin is odd"),
        ("a mute error", "_MuteError", "(its text cannot be had: RuntimeError)"),
    ],
)
def test_a_rank_that_cannot_report_is_the_culprit_with_its_cause(
    agent: Agent, tmp_path: Path, trouble: str, kind: str, message: str
) -> None:
    outcome = agent.run(_job(tmp_path / "trial", "mute", trouble, ranks=2))
    assert outcome.error is not None
    found = (outcome.status, outcome.error.rank, outcome.error.kind, outcome.error.message)
    assert found == ("failed", 1, kind, message)


def test_a_process_that_a_rank_forks_never_speaks_for_it(agent: Agent, tmp_path: Path) -> None:
    outcome = agent.run(_job(tmp_path, "forked", ranks=2))
    assert outcome == Outcome(status="ok", results=({"rank": 0}, {"rank": 1}))


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        pytest.param("hidden", "ok", id="of ranks that end"),
        pytest.param("kill_server", "lost", id="of a rank that kills the fork server"),
    ],
)
def test_processes_in_sessions_of_their_own_end_with_the_trial(
    agent: Agent, tmp_path: Path, entry: str, status: str
) -> None:
    assert agent.run(_job(tmp_path, entry, str(tmp_path))).status == status
    left = [int(path.read_text("utf-8")) for path in tmp_path.glob("hidden*")]
    assert [is_alive(pid) for pid in left] == [False] * len(left)
    assert left


@pytest.mark.parametrize("name", ["rank7.json", "rank0.json", "rankx.json"])
@pytest.mark.parametrize("content", ["{not json", "[]", '{"rank": 9}', "[" * 100_000])
def test_a_file_that_is_no_report_is_none(tmp_path: Path, name: str, content: str) -> None:
    RankReport(rank=3, state="running", phase="build", time=0.0).write(tmp_path)
    (tmp_path / name).write_text(content, "utf-8")
    (tmp_path / "rank8.json").mkdir()
    os.mkfifo(tmp_path / "rank9.json")
    assert list(read_reports(tmp_path)) == [3]


@pytest.mark.parametrize("fault", ["hang", "deaf"], ids=["that is told to end", "deaf to SIGTERM"])
def test_a_hang_ends_at_the_deadline(agent: Agent, tmp_path: Path, fault: str) -> None:
    outcome = agent.run(_job(tmp_path, "fault", fault, deadline_s=1.5))
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind, outcome.error.rank) == ("timeout", "timeout", 0)
    assert outcome.error.message.startswith("no result within 1.5 s; rank 0 ")


@pytest.mark.parametrize(
    ("entry", "payload"),
    [
        pytest.param("fault_of", ("hang", 1), id="a peer"),
        pytest.param("late_hang", None, id="a peer that has been silent for longer"),
    ],
)
def test_out_of_time_the_rank_that_hangs_is_named_and_not(
    agent: Agent, tmp_path: Path, entry: str, payload: tuple[str, int] | None
) -> None:
    waiter = Waiter(tmp_path, 0, Halt(kind="time_limit", message="the time limit was reached"))
    outcome = agent.run(_job(tmp_path, entry, payload, ranks=2), halt=waiter.halt)
    assert outcome.error is not None
    assert (outcome.status, outcome.error.rank) == ("timeout", 1)
    assert f"{ENTRIES.replace('.', '/')}.py" in (tmp_path / "rank1.log").read_text("utf-8")


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


def test_a_log_has_a_limit(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_ranks, "_MOST_OF_A_LOG", 4 * 2**20)
    assert agent.run(_job(tmp_path, "prints", 12)).status == "ok"
    log = (tmp_path / "rank0.log").read_text()
    assert len(log) <= 4 * 2**20
    assert (log.startswith("begin 0\n"), log.endswith("the end\n")) == (True, True)
    assert re.search(r"\n\[acbench: a log has at most 4 MiB; [\d,]+ bytes left out\]\n", log)


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


def test_the_death_of_the_fork_server_loses_the_trial_and_only_this_one(agent: Agent, tmp_path: Path) -> None:
    thread = threading.Thread(target=_kill_parent_of_rank, args=(tmp_path,))
    thread.start()
    outcome = agent.run(_job(tmp_path, "linger", str(tmp_path)))
    thread.join()
    assert outcome.status == "lost"
    assert outcome.error is not None
    assert outcome.error.message.endswith("has ended; its ranks were killed with it")
    require_dead(*_pids(tmp_path, 0))
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
    assert driver.wait(60) == code
    require_dead(*pids)


_DRIVER = f"""
import signal
import sys
from pathlib import Path
from harness.ranks.agent import Agent, sigterm_exits
from harness.ranks.start import RankJob

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
folder = sys.argv[1]
job = RankJob(
    trial_dir=Path(folder), entry="{ENTRIES}:linger", payload=folder, ranks=2, deadline_s=280
)
try:
    with sigterm_exits(), Agent() as agent:
        agent.run(job)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_ends_the_ranks_and_is_raised_again(agent: Agent, tmp_path: Path) -> None:
    def interrupt(_reports: Mapping[int, RankReport]) -> None:
        if (tmp_path / "pids0").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agent.run(_job(tmp_path, "linger", str(tmp_path)), watch=interrupt)
    require_dead(*_pids(tmp_path, 0))


def test_what_a_rank_started_ends_with_it(agent: Agent, tmp_path: Path) -> None:
    halt = Halt(kind="terminated", message="the lane was told to end")
    outcome = agent.run(
        _job(tmp_path, "linger", str(tmp_path)), halt=lambda: halt if _lingers(tmp_path, 0) else None
    )
    assert outcome.status == "lost"
    require_dead(*_pids(tmp_path, 0)[:2])


def test_sigterm_handling_ends_with_its_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, sigterm_exits():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_preload_that_cannot_be_imported_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForkServerError, match=r"fork server \d+: has ended"):
        ForkServer(("no_such_module",)).await_ready()
    assert "ModuleNotFoundError: No module named 'no_such_module'" in capfd.readouterr().err


def test_a_preload_may_be_a_function_that_is_called_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ForkServerError, match=r"fork server \d+: has ended"):
        ForkServer(("os:getpid", "os:abort_is_no_function")).await_ready()
    assert "module 'os' has no attribute 'abort_is_no_function'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "RankJob.ranks: must be at least 1, got 0"),
        ({"ranks": 2, "world_size": 3}, "RankJob.world_size: must be a multiple of the 2 local ranks, got 3"),
    ],
    ids=["no ranks", "ranks that do not fill nodes"],
)
def test_an_impossible_job_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _job(tmp_path, "ok", **fields)


def test_nodes_that_cannot_meet_are_refused(agent: Agent, tmp_path: Path) -> None:
    message = "RankJob.rendezvous: several nodes need an address that all of them know, got None"
    with pytest.raises(ValueError, match=message):
        agent.supervise(_job(tmp_path, "ok", world_size=2))


def test_one_agent_does_not_decide_about_two_nodes(agent: Agent, tmp_path: Path) -> None:
    message = "Agent.run: decides about one node, got a job on 2; use supervise"
    with pytest.raises(ValueError, match=message):
        agent.run(_job(tmp_path, "ok", world_size=2))


def test_every_trial_has_a_new_process(agent: Agent, tmp_path: Path) -> None:
    assert _process_of(agent, tmp_path) != _process_of(agent, tmp_path)


def test_ranks_run_on_the_cores_of_their_job(agent: Agent, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    outcome = agent.run(_job(tmp_path, "process", ranks=2, cores=(core,)))
    assert [result["cores"] for result in outcome.results] == [[core], [core]]


@pytest.mark.parametrize(
    ("halt", "status", "kind", "message"),
    [
        pytest.param(
            Halt(kind="time_limit", message="the time limit of the job was reached"),
            "timeout",
            "timeout",
            "the time limit of the job was reached; rank 0 is in phase parity, silent for ",
            id="time of the job",
        ),
        pytest.param(
            Halt(kind="terminated", message="the lane was told to end", error_kind="SIGTERM"),
            "lost",
            "SIGTERM",
            "the lane was told to end",
            id="a signal",
        ),
        pytest.param(
            Halt(kind="peer", message="another node has ended its ranks", error_kind="peer"),
            "lost",
            "peer",
            "another node has ended its ranks",
            id="a peer",
        ),
    ],
)
def test_a_halt_ends_the_ranks(
    agent: Agent, tmp_path: Path, halt: Halt, status: str, kind: str, message: str
) -> None:
    outcome = agent.run(
        _job(tmp_path, "fault", "hang"), halt=lambda: halt if has_begun(tmp_path, 0) else None
    )
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind) == (status, kind)
    assert outcome.error.message.startswith(message)


def test_a_signal_to_all_processes_is_the_agents_though_ranks_die_of_it_first(
    agent: Agent, tmp_path: Path
) -> None:
    halt = Halt(kind="terminated", message="the lane was told to end", error_kind="SIGTERM")
    job = _job(tmp_path, "fault_of", ("SIGTERM", 1), ranks=2)
    outcome = agent.run(job, halt=lambda: halt if _is_over(tmp_path, 1) else None)
    assert outcome.error is not None
    assert (outcome.status, outcome.error.kind, outcome.error.rank) == ("lost", "SIGTERM", None)


def _process_of(agent: Agent, folder: Path) -> int:
    pid: int = agent.run(_job(folder, "process")).results[0]["pid"]
    return pid


def _is_over(folder: Path, rank: int) -> bool:
    """Return whether the process of a rank that notes it has been and gone."""
    path = folder / f"pid{rank}"
    return has_begun(folder, rank) and not is_alive(int(path.read_text("utf-8")))


def _pids(folder: Path, rank: int) -> list[int]:
    """Return the process ids of a rank, its child and its parent, as soon as it lingers."""
    end_s = time.monotonic() + 200
    while not _lingers(folder, rank) and time.monotonic() < end_s:
        time.sleep(0.02)
    return [int(number) for number in (folder / f"pids{rank}").read_text("utf-8").split()]


def _lingers(folder: Path, rank: int) -> bool:
    path = folder / f"pids{rank}"
    return path.exists() and len(path.read_text("utf-8").split()) == 3


def _kill_parent_of_rank(folder: Path) -> None:
    os.kill(_pids(folder, 0)[2], signal.SIGKILL)


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


@pytest.mark.parametrize(
    "said", [pytest.param(None, id="nothing"), pytest.param("0", id="what the user says")]
)
def test_asking_for_a_gpu_spoils_no_fork_unless_the_user_wants_it(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if said is not None:
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", said)
    assert server_environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] == (said or "1")
