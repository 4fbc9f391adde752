from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.ranks.agent import Agent, RankJob
from harness.ranks.culprit import Outcome
from harness.ranks.entry import RankStart
from harness.ranks.persistent_server import PersistentServer
from harness.trial.run import TrialPlan
from strategies import ac_variants
from tests.parity.cases import MESHES, experiment

TRACES = "tests.harness.traces"
FAULTS = "tests.harness.rank_entries"
PRELOAD = ("harness.trial.run", "tests.parity.cases", TRACES, FAULTS)
OFFLOADED = Mesh(dp_shard=2, fsdp="fsdp1", cpu_offload=True)


def _case(timed_pairs: int = 0, **fields: Any) -> Experiment:
    made = experiment(parity_steps=1, **fields)
    return replace(made, protocol=replace(made.protocol, timed_pairs=timed_pairs))


def _cases() -> dict[str, Experiment]:
    """Return trials in an order in which what one leaves behind would change one after it."""
    cases = {
        "timed, with dropout": _case(variant="full", dropout=0.1, timed_pairs=2),
        "FSDP1 in mixed precision with parameters on the host": _case(mesh=OFFLOADED, dtype="bf16_mixed"),
    }
    for variant in sorted(ac_variants):
        cases[f"{variant} in bf16 with dropout"] = _case(variant=variant, dtype="bf16", dropout=0.1)
        for model, mesh in (("gpt", "tp2"), ("llama", "shard2"), ("gpt", "single"), ("llama", "ddp2")):
            name = f"{variant} of {model} on {mesh}"
            cases[name] = _case(model=model, mesh=MESHES[mesh], variant=variant)
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Agent]]:
    with Agent(PRELOAD) as fresh, Agent(PRELOAD, isolation="persistent") as living:
        yield {"fresh": fresh, "living": living}


@pytest.fixture
def living(agents: dict[str, Agent]) -> Agent:
    return agents["living"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@pytest.fixture(scope="module")
def outcomes(agents: dict[str, Agent], root: Path) -> dict[str, dict[str, Outcome]]:
    """All trials, one after the other in each kind of process; both kinds at once."""
    found: dict[str, dict[str, Outcome]] = {"fresh": {}, "living": {}}

    def run_all(kind: str) -> None:
        for index, (name, case) in enumerate(CASES.items()):
            found[kind][name] = agents[kind].run(_trial(case, root / kind / str(index)))

    threads = [threading.Thread(target=run_all, args=(kind,)) for kind in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first waits for all trials
@pytest.mark.parametrize("name", CASES)
def test_a_living_process_measures_what_a_new_one_does(
    outcomes: dict[str, dict[str, Outcome]], name: str
) -> None:
    fresh, living = (_comparable(outcomes[kind][name]) for kind in ("fresh", "living"))
    assert fresh.status == "ok", fresh.error
    assert living == fresh


@pytest.mark.timeout(1200)
def test_one_process_a_rank_has_run_all_of_them(outcomes: dict[str, dict[str, Outcome]], root: Path) -> None:
    assert len(outcomes["living"]) == len(CASES)
    logs = [path.read_text("utf-8") for path in (root / "living").glob("*/rank*.log")]
    assert len(logs) == sum(case.mesh.world_size for case in CASES.values())
    assert [log for log in logs if "process ends" in log] == []


def _trial(case: Experiment, folder: Path) -> RankJob:
    return RankJob(
        trial_dir=folder,
        entry="harness.trial.run:run",
        payload=TrialPlan(experiment=case),
        ranks=case.mesh.world_size,
        deadline_s=120.0,
    )


def _comparable(outcome: Outcome) -> Outcome:
    results = ({**result, "time": None, "environment": None} for result in outcome.results)
    return replace(outcome, results=tuple(results))


UNDONE = ["an environment variable", "draws", "garbage", "frozen garbage", "a warning", "no warnings"]


@pytest.mark.parametrize("trace", UNDONE)
def test_what_can_be_undone_is(living: Agent, tmp_path: Path, trace: str) -> None:
    before = _results(living, tmp_path, "find")
    left = _results(living, tmp_path, "leave", trace)
    assert [each["pid"] for each in left] == [each["pid"] for each in before]
    assert _results(living, tmp_path, "find") == before


def test_process_groups_end_with_their_trial(living: Agent, tmp_path: Path) -> None:
    before = _results(living, tmp_path, "find", ranks=2)
    for _ in range(3):
        _results(living, tmp_path, "leave", "meshes", ranks=2)
    assert _results(living, tmp_path, "find", ranks=2) == before


GONE = [
    "default dtype",
    "grad mode",
    "deterministic algorithms",
    "precision of matrix multiplications",
    "threads",
    "signal handlers",
    "folder",
    "sys.path",
    "hooks of all modules",
    "a living Tensor",
]


@pytest.mark.parametrize("trace", GONE)
def test_what_cannot_be_undone_ends_the_process_with_its_trial(
    living: Agent, tmp_path: Path, trace: str
) -> None:
    (left,) = _results(living, tmp_path, "leave", trace)
    log = (tmp_path / "rank0.log").read_text("utf-8")
    assert log == f"this rank's process ends with its trial, which changed {trace}\n"
    (found,) = _results(living, tmp_path, "find")
    assert found["pid"] != left["pid"]
    assert found["is_deaf"] is False


def test_a_package_that_was_not_preloaded_ends_the_process_with_its_trial(
    living: Agent, tmp_path: Path
) -> None:
    (tmp_path / "somebodys_model.py").write_text("calls = 0\n", "utf-8")
    payload = f"{tmp_path}/somebodys_model"
    (first,), (second,) = (_results(living, tmp_path, "bring", payload) for _ in range(2))
    assert first["pid"] != second["pid"]
    assert (tmp_path / "rank0.log").read_text("utf-8").endswith("which changed somebodys_model\n")


def test_every_trial_has_its_own_log(living: Agent, tmp_path: Path) -> None:
    for trial in ("first", "second"):
        _results(living, tmp_path / trial, "leave", "an unfinished line")
        log = (tmp_path / trial / "rank0.log").read_text("utf-8")
        assert [log.count(text) for text in ("from Python", "to stderr", "from C")] == [1, 1, 1]


def test_a_warning_that_is_shown_once_is_shown_once_a_trial(living: Agent, tmp_path: Path) -> None:
    for trial in ("first", "second"):
        _results(living, tmp_path / trial, "leave", "a warning")
        assert (tmp_path / trial / "rank0.log").read_text("utf-8").count("UserWarning: shown once") == 1


@pytest.mark.parametrize("fault", ["ValueError", "cpu_oom", "SIGKILL", "exit 5", "exit 0", "SystemExit"])
def test_a_fault_is_told_as_of_a_new_process_and_none_of_its_processes_lives_on(
    agents: dict[str, Agent], tmp_path: Path, fault: str
) -> None:
    before = _pids(agents["living"], tmp_path)
    job = _job(tmp_path, f"{FAULTS}:fault", fault, ranks=2)
    fresh, living = (agents[kind].run(job) for kind in ("fresh", "living"))
    assert fresh.error is not None
    assert living == fresh
    assert before.isdisjoint(_pids(agents["living"], tmp_path))


@pytest.mark.parametrize("fault", ["hang", "deaf"])
def test_a_hang_ends_at_the_deadline_and_its_processes_with_it(
    living: Agent, tmp_path: Path, fault: str
) -> None:
    before = _pids(living, tmp_path)
    assert living.run(_job(tmp_path, f"{FAULTS}:fault", fault, ranks=2, deadline_s=1.0)).status == "timeout"
    assert before.isdisjoint(_pids(living, tmp_path))


def test_an_abort_after_the_result_is_ok(living: Agent, tmp_path: Path) -> None:
    before = _pids(living, tmp_path)
    assert living.run(_job(tmp_path, f"{FAULTS}:abort_after_result", None, ranks=2)).status == "ok"
    assert before.isdisjoint(_pids(living, tmp_path))


def test_the_death_of_an_idle_process_concerns_no_trial(living: Agent, tmp_path: Path) -> None:
    before = _pids(living, tmp_path)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert before.isdisjoint(_pids(living, tmp_path))


@pytest.mark.parametrize(
    "fields",
    [{"threads_per_rank": 2}, {"cores": tuple(sorted(os.sched_getaffinity(0))[:1])}],
    ids=["other threads", "other cores"],
)
def test_what_a_process_is_born_with_takes_another_process(
    living: Agent, tmp_path: Path, fields: dict[str, Any]
) -> None:
    before = _pids(living, tmp_path)
    after = {result["pid"] for result in _results(living, tmp_path, "find", ranks=2, **fields)}
    assert before.isdisjoint(after)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_ranks_run_on_their_cores(agents: dict[str, Agent], tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    for agent in agents.values():
        (found,) = _results(agent, tmp_path, "find", cores=(core,))
        assert found["cores"] == [core]


def test_nothing_but_ranks_is_started() -> None:
    server = PersistentServer(())
    start = RankStart(
        trial_dir=Path(), entry="", payload=b"", rank=0, local_rank=0, world_size=1, device="cpu",
        backend=None, rendezvous=None, timeout_s=1.0, threads=1,
    )  # fmt: skip
    message = "PersistentServer.start: target must be 'harness.ranks.entry:main', got 'os:abort'"
    with pytest.raises(ValueError, match=message):
        server.start("os:abort", start)
    server.close()


def _results(
    agent: Agent, folder: Path, entry: str, payload: Any = None, *, ranks: int = 1, **fields: Any
) -> list[dict[str, Any]]:
    outcome = agent.run(_job(folder, f"{TRACES}:{entry}", payload, ranks=ranks, **fields))
    assert outcome.status == "ok", outcome.error
    return list(outcome.results)


def _pids(agent: Agent, folder: Path) -> set[int]:
    return {result["pid"] for result in _results(agent, folder, "find", ranks=2)}


def _job(folder: Path, entry: str, payload: Any, *, ranks: int, **fields: Any) -> RankJob:
    return RankJob(
        trial_dir=folder, entry=entry, payload=payload, ranks=ranks, **{"deadline_s": 60.0, **fields}
    )
