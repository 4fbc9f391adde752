"""Job arrays without a Slurm: what a job's end means, what is submitted, what is collected."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from harness.launchers import slurm_client as slurm
from harness.launchers import slurm_ends as ends
from harness.launchers import slurm_submit
from harness.launchers.base import End, InFlight, Sweep
from harness.launchers.lane_spec import STOP
from harness.launchers.slurm import Slurm
from harness.launchers.slurm_client import JobState, SlurmUnreachableError
from harness.launchers.slurm_ends import Look, end_of
from harness.launchers.slurm_submit import SubmissionError
from harness.launchers.task import Task
from harness.records.claims import (
    Submission,
    claim,
    claimant,
    folder_of,
    new_submission,
    read_submission,
    write_attempt,
    write_submission,
)
from tests.harness.sweeping import AT, attempt, sweep_in, task, tasks, write_record


@pytest.mark.parametrize(
    ("state", "end"),
    [
        pytest.param(
            JobState(job="7_0", state="TIMEOUT"),
            End(status="timeout", kind="TIMEOUT", message="job 7_0 was ended at its time limit of 5 min"),
            id="time limit",
        ),
        pytest.param(
            JobState(job="7", state="OUT_OF_MEMORY"),
            End(status="oom", kind="OUT_OF_MEMORY", message="job 7 was ended by the kernel's memory limit"),
            id="memory",
        ),
        pytest.param(
            JobState(job="7", state="CANCELLED"),
            End(status="lost", kind="CANCELLED", message="job 7 was cancelled"),
            id="scancel",
        ),
        pytest.param(
            JobState(job="7", state="NODE_FAIL"),
            End(status="lost", kind="NODE_FAIL", message="a node of job 7 failed"),
            id="a node",
        ),
        pytest.param(
            JobState(job="7", state="PREEMPTED"),
            End(status="lost", kind="PREEMPTED", message="job 7 was preempted and not requeued"),
            id="preemption",
        ),
        pytest.param(
            JobState(job="7", state="FAILED", exit_code=3),
            End(
                status="lost",
                kind="FAILED",
                message="job 7 ended with status 3 before the trial left a record",
            ),
            id="a status",
        ),
        pytest.param(
            JobState(job="7", state="FAILED", signal=9),
            End(
                status="lost",
                kind="FAILED",
                message="job 7 ended with signal 9 before the trial left a record",
            ),
            id="a signal",
        ),
    ],
)
def test_what_the_end_of_a_job_means(state: JobState, end: End) -> None:
    assert end_of(state, 5) == end


class _Cluster:
    """What the client of Slurm would say and do."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobState] = {}
        self.named: list[str] = []
        self.cancelled: list[tuple[set[str], bool]] = []
        self.submitted: list[list[str]] = []
        self.refusal: str | None = None
        self.is_reachable = True

    def states(self, jobs: Collection[str]) -> dict[str, JobState]:
        if not self.is_reachable:
            raise SlurmUnreachableError("squeue: no answer within 60 s")
        return {job: self.jobs[job] for job in jobs if job in self.jobs}

    def cancel(self, jobs: Collection[str], *, pending_only: bool = False) -> None:
        if jobs:
            self.cancelled.append((set(jobs), pending_only))

    def submit(self, calls: Sequence[Any], _request: object, _folder: Path) -> list[str]:
        if self.refusal is not None:
            raise SubmissionError(self.refusal)
        self.submitted.append([Path(call.words[-1]).stem.removeprefix("lane-") for call in calls])
        return [f"{len(self.submitted)}_{index}" for index in range(len(calls))]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    fake = _Cluster()
    monkeypatch.setattr(slurm, "require_slurm", lambda: None)
    monkeypatch.setattr(slurm, "states", fake.states)
    monkeypatch.setattr(slurm, "cancel", fake.cancel)
    monkeypatch.setattr(slurm, "find", lambda _name: fake.named)
    monkeypatch.setattr(slurm, "cluster_gpus", lambda _partition: 4)
    monkeypatch.setattr(slurm_submit, "submit", fake.submit)
    monkeypatch.setattr(ends, "_SETTLE_S", 0.0)
    return fake


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return sweep_in(tmp_path)


def _flight(sweep: Sweep, job: str | None = "7_0") -> InFlight:
    claim(sweep.store, [task().trial_id], "ours")
    return InFlight(task=task(), submission="ours", job=job)


def _ends(sweep: Sweep, flight: InFlight) -> dict[str, End | None]:
    return Look(sweep=sweep, time_min=5).ends([flight])


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"])
def test_a_job_that_may_go_on_is_no_end(cluster: _Cluster, sweep: Sweep, state: str) -> None:
    cluster.jobs["7_0"] = JobState(job="7_0", state=state)
    assert _ends(sweep, _flight(sweep)) == {}


def test_a_job_that_nobody_knows_is_lost(cluster: _Cluster, sweep: Sweep) -> None:
    assert not cluster.jobs
    message = "Slurm no longer knows job 7_0: it was cancelled before it started, or ended long ago"
    end = End(status="lost", kind="unknown", message=message)
    assert _ends(sweep, _flight(sweep)) == {task().trial_id: end}


def test_a_controller_that_does_not_answer_says_nothing(
    cluster: _Cluster, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.is_reachable = False
    look = Look(sweep=sweep, time_min=5)
    assert [look.ends([_flight(sweep)]) for _ in range(2)] == [{}, {}]
    assert capsys.readouterr().err == "acbench: squeue: no answer within 60 s; waiting for it\n"


def test_an_end_must_settle(cluster: _Cluster, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0, 12.9, 12.9, 13.0, 13.0])
    monkeypatch.setattr(ends, "_SETTLE_S", 3.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    cluster.jobs["7_0"] = JobState(job="7_0", state="CANCELLED")
    look, flight = Look(sweep=sweep, time_min=5), _flight(sweep)
    assert [bool(look.ends([flight])) for _ in range(2)] == [False, False]
    assert bool(look.ends([flight]))


@pytest.mark.parametrize(
    ("begun", "restarts", "is_lost"),
    [
        pytest.param({}, 1, True, id="it ran when its node failed"),
        pytest.param({"yielded": True}, 1, False, id="it was preempted"),
        pytest.param({}, 0, False, id="it runs"),
        pytest.param({"restarts": 1}, 1, False, id="it runs again"),
        pytest.param(None, 1, False, id="it had not begun"),
    ],
)
def test_a_job_that_was_requeued(
    cluster: _Cluster, sweep: Sweep, begun: dict[str, Any] | None, restarts: int, is_lost: bool
) -> None:
    cluster.jobs["7_0"] = JobState(job="7_0", state="PENDING", restarts=restarts)
    flight = _flight(sweep)
    if begun is not None:
        write_attempt(sweep.store, task().trial_id, attempt("ours", **begun))
    end = End(status="lost", kind="NODE_FAIL", message="a node of job 7_0 failed (alpha)")
    assert _ends(sweep, flight) == ({task().trial_id: end} if is_lost else {})
    assert cluster.cancelled == ([({"7_0"}, False)] if is_lost else [])


@pytest.mark.parametrize(
    ("state", "has_begun", "is_dropped"),
    [
        pytest.param("CANCELLED", False, True, id="it never began"),
        pytest.param("COMPLETED", False, True, id="its lane found the sweep stopped"),
        pytest.param(None, False, True, id="Slurm has forgotten it"),
        pytest.param("CANCELLED", True, False, id="it ran"),
        pytest.param(None, True, False, id="it ran, and Slurm has forgotten it"),
        pytest.param("FAILED", False, False, id="it failed for another reason"),
    ],
)
def test_what_ends_because_the_user_stopped_the_sweep_is_no_failure(
    cluster: _Cluster, sweep: Sweep, state: str | None, has_begun: bool, is_dropped: bool
) -> None:
    if state is not None:
        cluster.jobs["7_0"] = JobState(job="7_0", state=state)
    flight = _flight(sweep)
    if has_begun:
        write_attempt(sweep.store, task().trial_id, attempt("ours"))
    folder_of(sweep.store, "ours").mkdir(parents=True)
    (folder_of(sweep.store, "ours") / STOP).touch()
    (end,) = _ends(sweep, flight).values()
    assert (end is None) is is_dropped


def _submission(sweep: Sweep, work: Sequence[Task], **changes: Any) -> Submission:
    submission = replace(new_submission("slurm", AT), **changes)
    write_submission(sweep.store, submission)
    claim(sweep.store, (each.trial_id for each in work), submission.id)
    return submission


def test_dispatching_submits_one_array_a_shape_and_writes_down_its_jobs(
    cluster: _Cluster, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    work = [*tasks(2), task(2, "mesh=ddp2")]
    assert list(Slurm(wait=False).dispatch(sweep, work, [])) == []
    assert cluster.submitted == [[each.trial_id for each in work[:2]], [work[2].trial_id]]
    submission = read_submission(sweep.store, str(claimant(sweep.store, work[0].trial_id)))
    assert submission is not None
    jobs = dict(zip((each.trial_id for each in work), ("1_0", "1_1", "2_0"), strict=True))
    assert (submission.jobs, submission.is_submitted) == (jobs, True)
    assert capsys.readouterr().err == "submitted 3 points as Slurm jobs 1, 2\n"
    flights = Slurm().collect(sweep.store, "demo", work).flights
    assert [(flight.task.trial_id, flight.job) for flight in flights] == list(jobs.items())


def test_what_sbatch_refuses_altogether_is_refused(cluster: _Cluster, sweep: Sweep) -> None:
    cluster.refusal = "no such node"
    with pytest.raises(ConfigError) as caught:
        Slurm().dispatch(sweep, tasks(1), [])
    told = "hydra.launcher: sbatch did not take the jobs: no such node"
    assert str(caught.value) == told
    assert not sweep.store.record_path(task().trial_id).exists()
    assert claimant(sweep.store, task().trial_id) is None


def test_what_a_silent_controller_did_not_take_is_nobodys(
    cluster: _Cluster, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims without a job made points count as run elsewhere; a job that was taken keeps its trial."""
    work = [task(0), task(1, "mesh=ddp2")]

    def submit(calls: Sequence[Any], request: object, folder: Path) -> list[str]:
        if cluster.submitted:
            raise SlurmUnreachableError("sbatch: no answer")
        return cluster.submit(calls, request, folder)

    monkeypatch.setattr(slurm_submit, "submit", submit)
    with pytest.raises(ConfigError) as caught:
        Slurm().dispatch(sweep, work, [])
    assert str(caught.value) == "hydra/launcher: Slurm does not answer: sbatch: no answer"
    assert [claimant(sweep.store, each.trial_id) is None for each in work] == [False, True]


def test_what_has_ended_since_is_collected(cluster: _Cluster, sweep: Sweep) -> None:
    work = tasks(2)
    jobs = {each.trial_id: f"7_{index}" for index, each in enumerate(work)}
    submission = _submission(sweep, work, jobs=jobs, is_submitted=True)
    record = write_record(sweep.store, work[0].trial_id, submission.id)
    found = Slurm().collect(sweep.store, "demo", work)
    assert dict(found.records) == {work[0].trial_id: record}
    assert [flight.job for flight in found.flights] == ["7_1"]
    assert claimant(sweep.store, work[0].trial_id) is None
    assert cluster.cancelled == []


def test_a_driver_that_died_while_it_submitted(cluster: _Cluster, sweep: Sweep) -> None:
    work = tasks(3)
    submission = _submission(sweep, work, jobs={work[0].trial_id: "7_0"})
    write_attempt(sweep.store, work[1].trial_id, attempt(submission.id, job="8_0"))
    cluster.named = ["7_0", "8_0", "8_1"]
    found = Slurm().collect(sweep.store, "demo", work)
    assert [flight.job for flight in found.flights] == ["7_0", "8_0"]
    assert cluster.cancelled == [({"8_0", "8_1"}, True)]  # 7_0 is known, and may wait


def test_what_a_job_begins_between_plan_and_submission_is_followed(cluster: _Cluster, sweep: Sweep) -> None:
    work = tasks(2)
    submission = _submission(sweep, work)
    assert Slurm().collect(sweep.store, "demo", work).flights == []
    write_attempt(sweep.store, work[0].trial_id, attempt(submission.id, job="8_0"))
    record = write_record(sweep.store, work[0].trial_id, submission.id)
    run = Slurm().dispatch(sweep, work, [])
    assert cluster.submitted == [[work[1].trial_id]]
    assert next(run) == record


def test_submissions_of_other_launchers_are_left_alone(cluster: _Cluster, sweep: Sweep) -> None:
    _submission(sweep, tasks(1), launcher="slurm_packed")
    found = Slurm().collect(sweep.store, "demo", tasks(1))
    assert (dict(found.records), found.flights, cluster.cancelled) == ({}, [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"time_min": 0}, "hydra.launcher.time_min: must be at least 2, got 0", id="no time"),
        pytest.param(
            {"cpus_per_rank": 0}, "hydra.launcher.cpus_per_rank: must be at least 1, got 0", id="no cores"
        ),
        pytest.param(
            {"signal_delay_s": -1}, "hydra.launcher.signal_delay_s: must be at least 0, got -1", id="the past"
        ),
        pytest.param(
            {"time_min": 5, "signal_delay_s": 240},
            "hydra.launcher.signal_delay_s: must leave trials some of 5 min, of which Slurm may take 60 s "
            "more, got 240",
            id="no time is left",
        ),
        pytest.param({"poll_s": 0}, "hydra.launcher.poll_s: must be at least 0.05, got 0", id="no pause"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Slurm(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("asked", "mesh", "gpus"),
    [
        pytest.param(None, "mesh=ddp2 mesh.device=auto", 2, id="one a rank"),
        pytest.param(None, "mesh=ddp2 mesh.device=cpu", 0, id="none on the CPU"),
        pytest.param(3, "mesh=ddp2 mesh.device=cpu", 3, id="as asked"),
    ],
)
def test_gpus_of_an_element(cluster: _Cluster, asked: int | None, mesh: str, gpus: int) -> None:
    assert cluster.is_reachable
    assert Slurm(gpus_per_node=asked)._gpus(task(0, mesh).shape) == gpus


@pytest.mark.parametrize(
    ("asked", "mesh", "message"),
    [
        pytest.param(None, Mesh(dp_shard=4), None, id="nothing was said"),
        pytest.param(4, Mesh(dp_shard=4), None, id="it fits"),
        pytest.param(2, Mesh(dp_shard=4, nodes=2), None, id="it fits two nodes"),
        pytest.param(2, Mesh(dp_shard=4, device="cpu"), None, id="no rank needs a GPU"),
        pytest.param(0, Mesh(dp_shard=4), None, id="no GPU is asked for"),
        pytest.param(
            2,
            Mesh(dp_replicate=2, dp_shard=2),
            "hydra.launcher.gpus_per_node: hsdp2x2 has 4 ranks on a node, got 2",
            id="fewer GPUs than ranks",
        ),
    ],
)
def test_refuses_a_mesh_that_is_larger_than_what_was_asked_for(
    asked: int | None, mesh: Mesh, message: str | None
) -> None:
    found = None
    try:
        Slurm(gpus_per_node=asked).check(mesh)
    except ConfigError as error:
        found = str(error)
    assert found == message


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        pytest.param({}, {}, {}, id="the cluster decides"),
        pytest.param({"partition": "a"}, {}, {"partition": "a"}, id="an option"),
        pytest.param({}, {"SBATCH_PARTITION": "b"}, {"partition": "b"}, id="the user's variable"),
        pytest.param(
            {"partition": "a"}, {"SBATCH_PARTITION": "b"}, {"partition": "a"}, id="an option before it"
        ),
        pytest.param(
            {"partition": "a", "additional_parameters": {"partition": "c"}},
            {"SBATCH_PARTITION": "b"},
            {"partition": "c"},
            id="an additional parameter before both",
        ),
        pytest.param(
            {"gpus_per_node": 4, "additional_parameters": {"mem-per-cpu": 2, "reservation": "r"}},
            {},
            {"gpus_per_node": "4", "mem_per_cpu": "2"},
            id="GPUs and memory count, a reservation does not",
        ),
    ],
)
def test_what_was_asked_for_stands_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    variables: dict[str, str],
    words: dict[str, str],
) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Slurm(cpus_per_rank=2, **options).place(Mesh(dp_shard=4)) == {
        "device": {"slurm": words, "device": "auto"},
        "cpus": 8,
        "driver": None,
    }
