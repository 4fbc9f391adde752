"""Lanes: which trials node 0 takes, what it leaves of them, and how signals end it."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.launchers.lane import Halts, Location, _Lane, _read_spec, _status, job_meant
from harness.launchers.lane_spec import STOP, TERMINATED_STATUS, TIME_LIMIT_STATUS, LaneSpec
from harness.launchers.resource_shape import Resources
from harness.launchers.run_task import lost_task, rank_job
from harness.launchers.task import Task
from harness.measure.environment import describe, environment_id
from harness.ranks.culprit import Outcome
from harness.ranks.rank_report import RankReport
from harness.ranks.start import RankJob
from harness.records.claims import claim, new_submission, read_attempt, write_attempt, write_submission
from harness.records.files import ForeignFileError
from harness.records.record import Failure
from harness.records.store import Store
from harness.trial.trial_plan import TrialPlan
from tests.harness.records_fixture import rank_result
from tests.harness.sweeping import AT, FAILED, attempt, error_of, task, tasks, write_record

BROKEN = Outcome(
    status="failed",
    error=Failure(kind="ValueError", message="no", rank=0, phase="build", log="rank0.log"),
)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Give this process its handlers back: a lane's process ends with the lane."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _Bench:
    """A lane whose ranks are played by the test."""

    def __init__(self, root: Path, work: list[Task]) -> None:
        self.store = Store(root)
        submission = new_submission("slurm", AT)
        self.submission = submission.id
        write_submission(self.store, submission)
        claim(self.store, (each.trial_id for each in work), self.submission)
        self.halts = Halts()
        self.ran: list[str] = []
        self.lost: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.outcome = BROKEN
        self.spec = LaneSpec(
            name="0",
            launcher="slurm",
            submission=self.submission,
            root=root,
            sweep="demo",
            tasks=tuple(work),
            resources=Resources(core_count=1),
            sys_path=(),
        )

    def run(self, *, restarts: int = 0) -> None:
        location = Location(node_rank=0, hosts=("alpha",), job="7", restarts=restarts)
        _Lane(
            spec=self.spec,
            location=location,
            halts=self.halts,
            run_ranks=self._play,
            lost=lambda: self.lost,
            call=lambda *_, **__: None,
        ).run()

    def _play(self, job: RankJob) -> Outcome:
        """Play the ranks of a trial."""
        self.ran.append(job.trial_dir.name)
        self.meanwhile()
        return self.outcome


@pytest.fixture
def bench(tmp_path: Path) -> _Bench:
    return _Bench(tmp_path, tasks(3))


def _ids(*numbers: int) -> list[str]:
    return [task(number).trial_id for number in numbers]


def test_a_lane_runs_its_trials_in_order_and_leaves_their_records(bench: _Bench) -> None:
    bench.run(restarts=1)
    assert bench.ran == _ids(0, 1, 2)
    record = bench.store.read(_ids(0)[0])
    assert error_of(record) == ("failed", "ValueError", "no")
    assert record.environment["job"] == {
        "launcher": "slurm",
        "submission": bench.submission,
        "lane": "0",
        "id": "7",
        "restarts": 1,
        "hosts": ["alpha"],
    }


def test_a_trial_is_attempted_before_its_ranks_start(bench: _Bench) -> None:
    seen: list[Any] = []
    bench.meanwhile = lambda: seen.append(read_attempt(bench.store, bench.ran[-1], bench.submission))
    bench.run()
    assert [(each.lane, each.job, each.restarts, each.hosts, each.yielded) for each in seen] == [
        ("0", "7", 0, ("alpha",), False)
    ] * 3


def _of_another(bench: _Bench) -> None:
    claim(bench.store, _ids(1), "another")


def _recorded(bench: _Bench) -> None:
    write_record(bench.store, _ids(1)[0], bench.submission)


def _recorded_before(bench: _Bench) -> None:
    write_record(bench.store, _ids(1)[0], "earlier")


def _yielded(bench: _Bench) -> None:
    write_attempt(bench.store, _ids(1)[0], attempt(bench.submission, yielded=True))


def _of_an_earlier_claim(bench: _Bench) -> None:
    write_attempt(bench.store, _ids(1)[0], attempt("earlier"))


@pytest.mark.parametrize(
    ("before", "is_taken"),
    [
        pytest.param(_of_another, False, id="claimed by a later command"),
        pytest.param(_recorded, False, id="with a record of this submission"),
        pytest.param(_recorded_before, True, id="with a record of another"),
        pytest.param(_yielded, True, id="that was ended from outside"),
        pytest.param(_of_an_earlier_claim, True, id="attempted for another"),
    ],
)
def test_which_trials_are_taken(bench: _Bench, before: Callable[[_Bench], None], is_taken: bool) -> None:
    before(bench)
    bench.run()
    assert bench.ran == (_ids(0, 1, 2) if is_taken else _ids(0, 2))


def test_a_trial_that_another_lane_holds_is_left_to_it(bench: _Bench) -> None:
    with bench.store.locked(_ids(1)[0]):
        bench.run()
    assert bench.ran == _ids(0, 2)


@pytest.mark.parametrize(
    ("restarts", "kind"),
    [
        pytest.param(0, "lost", id="its agent died"),
        pytest.param(1, "NODE_FAIL", id="the job was started again after a node had failed"),
    ],
)
def test_a_trial_that_died_with_its_agent_is_reported_and_not_repeated(
    bench: _Bench, restarts: int, kind: str
) -> None:
    write_attempt(bench.store, _ids(1)[0], attempt(bench.submission, hosts=("alpha", "beta")))
    bench.run(restarts=restarts)
    assert bench.ran == _ids(0, 2)
    message = "the agent on alpha, beta ended while the trial ran, and left no report"
    assert error_of(bench.store.read(_ids(1)[0])) == ("lost", kind, message)


def test_a_trial_that_died_began_when_it_was_attempted_and_says_how_far_it_came(bench: _Bench) -> None:
    _report(bench, "timing")
    write_attempt(bench.store, _ids(1)[0], attempt(bench.submission))
    bench.run()
    record = bench.store.read(_ids(1)[0])
    assert record.error is not None
    assert (record.started_at, record.error.phase) == (AT, "timing")
    assert record.finished_at > AT
    folder = bench.store.trial_dir(_ids(1)[0])
    assert (folder / "experiment.yaml").read_text("utf-8") == task(1).yaml


def test_how_far_an_earlier_attempt_came_says_nothing_of_a_trial_that_never_began(bench: _Bench) -> None:
    _report(bench, "timing")
    error = Failure(kind="lost", message="no")
    job = {"submission": bench.submission}
    write_attempt(bench.store, _ids(1)[0], attempt("earlier"))
    record = lost_task(task(1), error, store=bench.store, name="demo", job=job)
    assert record.error is not None
    assert record.error.phase is None
    assert record.started_at == record.finished_at


def _report(bench: _Bench, phase: str) -> None:
    RankReport(rank=0, state="running", phase=phase, time=1.0).write(bench.store.trial_dir(_ids(1)[0]))


def test_the_address_of_a_record_says_where_it_was_to_run(tmp_path: Path) -> None:
    place = {"device": {"slurm": {"partition": "a"}, "device": "auto"}, "cpus": 2}
    bench = _Bench(tmp_path, [replace(task(), place=place)])
    bench.spec = replace(bench.spec, resources=Resources(core_count=2))
    bench.run()
    record = bench.store.read(_ids(0)[0])
    assert record.environment_id == environment_id(describe("cpu") | place)
    assert record.environment["cpus"] == 2
    assert record.environment["device"] == describe("cpu")["device"]


def test_a_lane_that_is_told_to_go_leaves_its_trial_to_be_run_again(bench: _Bench) -> None:
    bench.outcome = FAILED
    with bench.halts:
        bench.meanwhile = lambda: signal.raise_signal(signal.SIGTERM)
        bench.run()
    assert bench.ran == _ids(0)
    begun = read_attempt(bench.store, _ids(0)[0], bench.submission)
    assert begun is not None
    assert begun.yielded
    assert not bench.store.record_path(_ids(0)[0]).exists()
    assert _status(bench.halts) == TERMINATED_STATUS

    bench.halts, bench.meanwhile = Halts(), lambda: None
    bench.run(restarts=1)
    assert bench.ran == _ids(0, 0, 1, 2)


def test_a_trial_that_ended_well_in_spite_of_a_signal_is_kept(bench: _Bench) -> None:
    bench.outcome = Outcome(status="ok", results=[rank_result()])
    with bench.halts:
        bench.meanwhile = lambda: signal.raise_signal(signal.SIGTERM)
        bench.run()
    assert bench.ran == _ids(0)
    assert bench.store.read(_ids(0)[0]).status == "ok"


def test_the_time_limit_is_a_record_and_ends_the_lane(bench: _Bench) -> None:
    with bench.halts:
        bench.meanwhile = lambda: signal.raise_signal(signal.SIGUSR2)
        bench.run()
    assert bench.ran == _ids(0)
    assert bench.store.read(_ids(0)[0]).status == "failed"  # as the ranks ended
    assert _status(bench.halts) == TIME_LIMIT_STATUS


def test_a_lane_that_was_stopped_takes_no_other_trial(bench: _Bench) -> None:
    bench.meanwhile = (bench.spec.folder / STOP).touch
    bench.run()
    assert bench.ran == _ids(0)
    assert _status(bench.halts) == 0


@pytest.mark.parametrize(
    ("signals", "kind", "error_kind", "status"),
    [
        pytest.param([], None, None, 0, id="none"),
        pytest.param([signal.SIGUSR2], "time_limit", "timeout", TIME_LIMIT_STATUS, id="the time limit"),
        pytest.param([signal.SIGTERM], "terminated", "SIGTERM", TERMINATED_STATUS, id="termination"),
        pytest.param(
            [signal.SIGUSR2, signal.SIGTERM],
            "terminated",
            "SIGTERM",
            TERMINATED_STATUS,
            id="termination after the limit",
        ),
        pytest.param(
            [signal.SIGTERM, signal.SIGUSR2],
            "terminated",
            "SIGTERM",
            TERMINATED_STATUS,
            id="the limit after termination",
        ),
        pytest.param([signal.SIGINT], None, None, 0, id="Ctrl-C is the driver's affair"),
    ],
)
def test_signals(
    signals: list[signal.Signals], kind: str | None, error_kind: str | None, status: int
) -> None:
    with Halts() as halts:
        for number in signals:
            signal.raise_signal(number)
        halt = halts.halt()
    assert (halt and halt.kind, halt and halt.error_kind, _status(halts)) == (kind, error_kind, status)
    signal.raise_signal(signal.SIGTERM)  # too late to matter


@pytest.mark.parametrize(
    ("variables", "location"),
    [
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"},
            Location(node_rank=1, hosts=("n1", "n2"), job="7", restarts=0),
            id="a job",
        ),
        pytest.param(
            {
                "SLURM_JOB_ID": "9",
                "SLURM_ARRAY_JOB_ID": "7",
                "SLURM_ARRAY_TASK_ID": "3",
                "SLURM_NODEID": "0",
                "SLURM_JOB_NODELIST": "n1",
                "SLURM_RESTART_COUNT": "2",
            },
            Location(node_rank=0, hosts=("n1",), job="7_3", restarts=2),
            id="an element of an array that was requeued twice",
        ),
        pytest.param(
            {
                "SLURM_JOB_ID": "7",
                "SLURM_NODEID": "0",
                "SLURM_JOB_NODELIST": "n[1-4]",
                "SLURM_STEP_NODELIST": "n3",
            },
            Location(node_rank=0, hosts=("n3",), job="7", restarts=0),
            id="a step on some nodes of its job",
        ),
    ],
)
def test_the_location_of_a_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], location: Location
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Location.here() == location


def test_a_spec_is_read_as_it_was_written(bench: _Bench) -> None:
    spec = replace(bench.spec, name="a", driver_pid=1)
    assert spec.write() == bench.spec.folder / "lane-a.pickle"
    path = bench.spec.folder / "lane-a.pickle"
    assert pickle.loads(path.read_bytes()) == spec
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_spec_that_others_could_have_written_is_not_read(bench: _Bench) -> None:
    path = bench.spec.write()
    path.chmod(0o660)
    with pytest.raises(ForeignFileError, match="must have mode 0600, got 0660"):
        _read_spec(path)


def test_a_lane_that_has_lost_a_node_takes_no_other_trial(bench: _Bench) -> None:
    bench.meanwhile = lambda: bench.lost.append(1)
    bench.run()
    assert bench.ran == _ids(0)


def test_a_follower_has_the_job_of_node_0_from_its_own_spec(bench: _Bench) -> None:
    trial = _ids(1)[0]
    job = job_meant(bench.spec, {"trial": trial, "baseline": "sequential"})
    plan = TrialPlan(experiment=bench.spec.tasks[1].experiment, baseline="sequential")
    assert job == rank_job(plan, bench.store.trial_dir(trial), bench.spec.resources)


@pytest.mark.parametrize(
    "words",
    [{}, {"trial": "0" * 12}, {"trial": "0" * 12, "baseline": "x"}, {"trial": "../..", "baseline": "none"}],
    ids=["nothing", "no baseline", "an unknown baseline", "no trial of its own"],
)
def test_words_that_mean_no_job_are_refused(bench: _Bench, words: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="lane 0: no trial"):
        job_meant(bench.spec, words)
