"""Packing: disjoint slices of a pool, and lanes that start, end and die on them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from harness.launchers import packing
from harness.launchers.lane_spec import STOP, TERMINATED_STATUS, TIME_LIMIT_STATUS, LaneSpec
from harness.launchers.packing import Need, Packer, Packing, Pool, Slice
from harness.launchers.resource_shape import Resources, by_shape
from harness.launchers.task import Task
from harness.records.claims import DRIVEN, claim, folder_of, new_submission, write_attempt, write_submission
from harness.records.store import Store
from tests.harness.sweeping import AT, attempt, error_of, task, tasks, write_record

HOSTS = ("alpha", "beta")


def _pool(*, gpus: int = 2, cores: int = 4) -> Pool:
    return Pool(HOSTS, gpus=range(gpus), cores=range(cores))


def _need(nodes: int = 1, gpus: int = 0, cores: int = 1) -> Need:
    return Need(nodes=nodes, gpus=gpus, cores=cores)


@pytest.mark.parametrize(
    ("needs", "slices"),
    [
        pytest.param(
            [_need(gpus=1, cores=2)] * 2,
            [({"alpha": (0,)}, {"alpha": (0, 1)}), ({"alpha": (1,)}, {"alpha": (2, 3)})],
            id="the second fills the host of the first",
        ),
        pytest.param(
            [_need(cores=3)] * 3,
            [({"alpha": ()}, {"alpha": (0, 1, 2)}), ({"beta": ()}, {"beta": (0, 1, 2)}), None],
            id="what is left on two hosts is no slice of one",
        ),
        pytest.param(
            [_need(nodes=2, gpus=2), _need(gpus=1), _need()],
            [
                ({"alpha": (0, 1), "beta": (0, 1)}, {"alpha": (0,), "beta": (0,)}),
                None,
                ({"alpha": ()}, {"alpha": (1,)}),
            ],
            id="cores without GPUs",
        ),
        pytest.param([_need(nodes=3)], [None], id="more nodes than there are"),
        pytest.param(
            [_need(cores=1), _need(nodes=2, cores=4)],
            [({"alpha": ()}, {"alpha": (0,)}), None],
            id="both nodes must be free enough",
        ),
        pytest.param(
            [_need(cores=0)] * 2,
            [({"alpha": ()}, {"alpha": ()}), ({"alpha": ()}, {"alpha": ()})],
            id="shared cores are not counted",
        ),
    ],
)
def test_slices(needs: Sequence[Need], slices: Sequence[tuple[Any, Any] | None]) -> None:
    pool = _pool()
    found = [pool.take(need) for need in needs]
    assert [None if each is None else (each.gpus, each.cores) for each in found] == slices


def test_what_is_given_back_is_taken_again() -> None:
    pool = _pool()
    whole = _need(nodes=2, gpus=2, cores=4)
    first = pool.take(whole)
    assert first is not None
    assert first.hosts == HOSTS
    assert pool.take(_need()) is None
    pool.give(first)
    assert pool.take(whole) == first


class _Process:
    """A lane that ends when the test says so."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.is_terminated = False

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self.is_terminated, self.returncode = True, -signal.SIGTERM

    def wait(self) -> int | None:
        return self.returncode


class _Lanes:
    """Fake lanes on a real store."""

    def __init__(self, root: Path) -> None:
        self.store = Store(root)
        submission = new_submission(DRIVEN, AT)
        self.submission = submission.id
        write_submission(self.store, submission)
        self.started: list[tuple[LaneSpec, Slice, _Process]] = []

    def start(self, spec: LaneSpec, slice_: Slice) -> subprocess.Popen[bytes]:
        process = _Process()
        self.started.append((spec, slice_, process))
        (spec.folder / f"lane-{spec.name}.log").touch()
        return cast("subprocess.Popen[bytes]", process)

    def packer(
        self, work: Sequence[Task], *, pool: Pool | None = None, most: int = 8, restarts: int = 0
    ) -> Packer:
        claim(self.store, (each.trial_id for each in work), self.submission)
        shapes = by_shape((each.shape, each) for each in work)
        shared = Packing(
            launcher="local",
            submission=self.submission,
            store=self.store,
            sweep="demo",
            needs={shape: _need(cores=shape.ranks_per_node) for shape in shapes},
            most=most,
            start=self.start,
            resources=lambda slice_: Resources(core_count=sum(map(len, slice_.cores.values()))),
            restarts=restarts,
        )
        return Packer(packing=shared, tasks=shapes, pool=pool or _pool())

    def begin(self, number: int, lane: str) -> None:
        write_attempt(self.store, task(number).trial_id, attempt(self.submission, lane=lane))

    def finish(self, number: int) -> None:
        write_record(self.store, task(number).trial_id, self.submission)

    def end(self, lane: int, code: int = 0) -> None:
        self.started[lane][2].returncode = code

    def errors(self, work: Sequence[Task]) -> Mapping[str, tuple[str, str, str]]:
        there = [each.trial_id for each in work if self.store.record_path(each.trial_id).exists()]
        records = {trial_id: self.store.read(trial_id) for trial_id in there}
        return {trial: error_of(each) for trial, each in records.items() if each.error is not None}


@pytest.fixture
def lanes(tmp_path: Path) -> _Lanes:
    return _Lanes(tmp_path)


@pytest.mark.parametrize(
    ("count", "cores", "most", "started"),
    [
        pytest.param(20, 4, 8, 8, id="as many as fit the pool"),
        pytest.param(20, 4, 3, 3, id="as many as are allowed"),
        pytest.param(2, 4, 8, 2, id="no more than there are trials"),
        pytest.param(0, 4, 8, 0, id="none for nothing"),
    ],
)
def test_lanes_at_once(lanes: _Lanes, count: int, cores: int, most: int, started: int) -> None:
    packer = lanes.packer(tasks(count), pool=_pool(cores=cores), most=most)
    assert packer.advance() is (started == 0)
    assert len(lanes.started) == started
    assert packer.advance() is (started == 0)
    assert len(lanes.started) == started
    assert [spec.name for spec, _, _ in lanes.started] == [f"0-{number}" for number in range(started)]


def test_every_lane_may_take_every_trial_of_its_shape(lanes: _Lanes) -> None:
    work = [*tasks(2), task(2, "mesh=ddp2")]
    lanes.packer(work).advance()
    found = [[each.trial_id for each in spec.tasks] for spec, _, _ in lanes.started]
    assert found == [[work[2].trial_id]] + 2 * [[each.trial_id for each in work[:2]]]  # the largest first
    assert [spec.resources.core_count for spec, _, _ in lanes.started] == [2, 1, 1]


def test_a_lane_that_ends_gives_its_slice_to_another_shape(lanes: _Lanes) -> None:
    work = [task(0), task(1, "mesh=ddp2")]
    packer = lanes.packer(work, pool=Pool(["alpha"], gpus=(), cores=range(2)))
    assert not packer.advance()
    assert len(lanes.started) == 1
    lanes.begin(1, "0-0")
    lanes.finish(1)
    lanes.end(0)
    assert not packer.advance()
    assert [spec.tasks for spec, _, _ in lanes.started[1:]] == [(work[0],)]
    lanes.begin(0, "0-1")
    lanes.finish(0)
    lanes.end(1)
    assert packer.advance()
    assert len(lanes.started) == 2


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        pytest.param(-signal.SIGKILL, "SIGKILL", "was killed by SIGKILL", id="killed"),
        pytest.param(128 + signal.SIGKILL, "SIGKILL", "was killed by SIGKILL", id="killed, as srun says it"),
        pytest.param(-signal.SIGSEGV, "SIGSEGV", "was killed by SIGSEGV", id="crashed"),
        pytest.param(1, "exit 1", "ended with status 1", id="an error of its own"),
    ],
)
def test_a_lane_that_dies_loses_its_trial_and_another_takes_the_rest(
    lanes: _Lanes, code: int, kind: str, words: str
) -> None:
    work = tasks(2)
    packer = lanes.packer(work, most=1)
    packer.advance()
    lanes.begin(0, "0-0")
    lanes.end(0, code)
    assert not packer.advance()
    message = f"the lane {words} while the trial ran, on alpha; see lane-0-0.log"
    assert lanes.errors(work) == {work[0].trial_id: ("lost", kind, message)}
    assert len(lanes.started) == 2


def test_a_lane_that_dies_after_its_record_loses_nothing(lanes: _Lanes) -> None:
    work = tasks(2)
    packer = lanes.packer(work, most=1)
    packer.advance()
    lanes.begin(0, "0-0")
    lanes.finish(0)
    lanes.begin(1, "0-0")
    lanes.end(0, -signal.SIGKILL)
    assert packer.advance()
    assert list(lanes.errors(work)) == [work[1].trial_id]


def test_lanes_that_cannot_begin_are_not_started_for_ever(lanes: _Lanes) -> None:
    work = tasks(3)
    packer = lanes.packer(work, most=1)
    for lane in range(3):  # one that dies is replaced, also twice
        assert not packer.advance()
        assert (len(lanes.started), lanes.errors(work)) == (lane + 1, {})
        lanes.end(lane, 1)
    assert packer.advance()
    message = "the lane ended with status 1 before the trial began, on alpha; see lane-0-2.log"
    assert lanes.errors(work) == {each.trial_id: ("lost", "exit 1", message) for each in work}
    assert len(lanes.started) == 3


def test_no_lane_is_blamed_where_the_allocation_is_ended_from_outside(lanes: _Lanes) -> None:
    """Each trial was said to have failed in a lane whose log did not exist."""
    work = tasks(8)
    packer = lanes.packer(work, most=2)
    packer.advance()
    lanes.begin(0, "0-0")
    packer.end_soon()
    lanes.end(0, TERMINATED_STATUS)
    assert not packer.advance()
    lanes.end(1, 1)
    assert packer.advance()
    assert (len(lanes.started), lanes.errors(work)) == (2, {})


def test_a_log_that_is_not_there_is_not_named(lanes: _Lanes) -> None:
    work = tasks(1)
    packer = lanes.packer(work, most=1)
    packer.advance()
    lanes.begin(0, "0-0")
    next(lanes.store.root.rglob("lane-0-0.log")).unlink()
    lanes.end(0, 1)
    packer.advance()
    ((_, _, message),) = lanes.errors(work).values()
    assert message == "the lane ended with status 1 while the trial ran, on alpha"


def test_a_lane_that_began_a_trial_ends_a_row_of_those_that_could_not(lanes: _Lanes) -> None:
    work = tasks(2)
    packer = lanes.packer(work, most=1)
    packer.advance()
    for lane in range(2):
        lanes.end(lane, 1)
        packer.advance()
    lanes.begin(0, "0-2")
    lanes.end(2, 1)
    packer.advance()
    lanes.end(3, 1)
    assert not packer.advance()
    assert list(lanes.errors(work)) == [work[0].trial_id]
    assert len(lanes.started) == 5


def test_trials_that_a_later_command_has_taken_over_are_left_to_it(lanes: _Lanes) -> None:
    work = tasks(3)
    packer = lanes.packer(work, most=1)
    packer.advance()
    claim(lanes.store, (each.trial_id for each in work), "another")
    lanes.end(0)
    assert packer.advance()
    assert len(lanes.started) == 1
    assert lanes.errors(work) == {}


@pytest.mark.parametrize("code", [1, TIME_LIMIT_STATUS], ids=["lanes that cannot begin", "time is over"])
def test_what_was_taken_over_is_not_lost(lanes: _Lanes, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(packing, "_FRUITLESS", 1)
    work = tasks(3)
    packer = lanes.packer(work, most=1)
    packer.advance()
    claim(lanes.store, [work[1].trial_id], "another")
    lanes.end(0, code)
    assert packer.advance()
    assert list(lanes.errors(work)) == [work[0].trial_id, work[2].trial_id]


def test_a_trial_that_somebody_holds_is_not_lost(lanes: _Lanes) -> None:
    work = tasks(1)
    packer = lanes.packer(work)
    packer.advance()
    lanes.begin(0, "0-0")
    with lanes.store.locked(work[0].trial_id):
        lanes.end(0, 1)
        packer.advance()
    assert lanes.errors(work) == {}


def test_no_lane_starts_when_the_sweep_was_stopped(lanes: _Lanes) -> None:
    work = tasks(3)
    packer = lanes.packer(work, most=1)
    packer.advance()
    (folder_of(lanes.store, lanes.submission) / STOP).touch()
    lanes.end(0)
    assert packer.advance()
    assert len(lanes.started) == 1
    assert lanes.errors(work) == {}


def test_at_the_time_limit_what_has_not_begun_is_recorded(lanes: _Lanes) -> None:
    work = [*tasks(3), task(3, "mesh=ddp2")]
    packer = lanes.packer(work, most=1)
    packer.advance()
    lanes.begin(3, "0-0")
    lanes.finish(3)
    lanes.end(0, TIME_LIMIT_STATUS)
    assert packer.advance()
    assert len(lanes.started) == 1
    message = "the time limit of the allocation was reached before the trial began"
    assert lanes.errors(work) == {each.trial_id: ("timeout", "TIMEOUT", message) for each in work[:3]}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(TERMINATED_STATUS, id="it was told to go"),
        pytest.param(-signal.SIGTERM, id="SIGTERM came before it could be heard"),
    ],
)
@pytest.mark.parametrize(
    ("later_s", "is_replaced"),
    [
        pytest.param(packing._TOLD_S - 0.1, False, id="the allocation may end at any moment"),
        pytest.param(packing._TOLD_S, True, id="the allocation has stayed"),
    ],
)
def test_a_lane_that_was_told_to_end_is_replaced_after_a_while(
    lanes: _Lanes, monkeypatch: pytest.MonkeyPatch, code: int, later_s: float, is_replaced: bool
) -> None:
    clock_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    work = tasks(2)
    packer = lanes.packer(work, most=1)
    packer.advance()
    lanes.begin(0, "0-0")
    write_attempt(lanes.store, work[0].trial_id, attempt(lanes.submission, lane="0-0", yielded=True))
    lanes.end(0, code)
    assert not packer.advance()
    assert len(lanes.started) == 1
    clock_s[0] += later_s
    assert not packer.advance()
    assert [spec.name for spec, _, _ in lanes.started] == (["0-0", "0-1"] if is_replaced else ["0-0"])
    assert lanes.errors(work) == {}


@pytest.mark.parametrize(
    ("begun", "is_lost"),
    [
        pytest.param({}, True, id="its node failed"),
        pytest.param({"yielded": True}, False, id="it was ended from outside"),
        pytest.param({"restarts": 1}, False, id="it has begun since"),
        pytest.param(None, False, id="it had not begun"),
    ],
)
def test_what_an_earlier_run_of_the_allocation_left(
    lanes: _Lanes, begun: dict[str, Any] | None, is_lost: bool
) -> None:
    work = tasks(2)
    packer = lanes.packer(work, restarts=1)
    if begun is not None:
        write_attempt(lanes.store, work[0].trial_id, attempt(lanes.submission, lane="0-0", **begun))
    lanes.begin(1, "0-1")
    lanes.finish(1)
    packer.record_earlier_deaths()
    error = ("lost", "NODE_FAIL", "a node of job 7 failed (alpha)")
    assert lanes.errors(work) == ({work[0].trial_id: error} if is_lost else {})
    packer.advance()
    is_left = begun is None or begun.get("yielded", False)
    assert [spec.name for spec, _, _ in lanes.started] == (["1-0"] if is_left else [])


def test_stopping_leaves_the_running_lanes_alone(lanes: _Lanes) -> None:
    packer = lanes.packer(tasks(3), most=1)
    packer.advance()
    packer.stop()
    assert not packer.advance()
    assert (folder_of(lanes.store, lanes.submission) / STOP).exists()
    assert not lanes.started[0][2].is_terminated


def test_leaving_ends_what_runs(lanes: _Lanes) -> None:
    with lanes.packer(tasks(3)) as packer:
        packer.advance()
    assert [process.is_terminated for _, _, process in lanes.started] == [True] * 3
