"""Plans: which points of a sweep are left to run, and the line that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.experiment.mesh import Mesh
from harness.launchers.base import Collected, InFlight
from harness.launchers.local import Local
from harness.launchers.task import Point, Task
from harness.measure.environment import describe, environment_id
from harness.records.store import Store
from harness.sweep.plan import plan_sweep
from tests.harness.composing import point_of
from tests.harness.sweeping import write_record

PLACE = {"device": {"slurm": {"partition": "a"}, "device": "auto"}, "cpus": 2}
ADDRESS = environment_id(describe("cpu") | PLACE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launcher(Local):
    """Knows of earlier submissions by trial_id."""

    flying: frozenset[str] = frozenset()
    landed: dict[str, Any] = field(default_factory=dict)

    def place(self, mesh: Mesh) -> dict[str, Any]:  # noqa: ARG002
        return PLACE

    def collect(self, store: Store, name: str, tasks: Sequence[Task]) -> Collected:  # noqa: ARG002
        flights = [
            InFlight(task=task, submission="earlier", job="7")
            for task in tasks
            if task.trial_id in self.flying
        ]
        return Collected(records=self.landed, flights=flights)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    lines = ("mesh=single", "mesh=shard2", "mesh=single seed=1", "mesh=shard2 seed=1")
    return [point_of(f"model=mlp data=synthetic {line}") for line in lines]


def _refused(point: Point) -> Point:
    return replace(point, trial_id="f" * 12, experiment=None, refusal=ConfigError("ac", "no"))


def _line(
    points: Sequence[Point], store: Store, launcher: Local | None = None, *, rerun: bool = False
) -> str:
    return str(plan_sweep(points, launcher or _Launcher(), store, name="demo", rerun=rerun))


def _done(store: Store, point: Point, **changes: Any) -> Any:
    return write_record(store, point.trial_id, **{"environment_id": ADDRESS} | changes)


def test_everything_is_to_run_in_a_new_folder(points: list[Point], tmp_path: Path) -> None:
    line = _line([*points, points[0]], Store(tmp_path))
    assert line == "5 points: 4 to run, 0 done, 1 duplicates; shapes 1x1: 2, 1x2: 2"


def test_every_fate_of_a_point_is_counted(points: list[Point], tmp_path: Path) -> None:
    store = Store(tmp_path)
    _done(store, points[0])
    launcher = _Launcher(flying=frozenset({points[1].trial_id}))
    asked = [*points, _refused(points[0]), points[2], points[2]]
    line = "7 points: 2 to run, 1 done, 1 in flight, 1 refused, 2 duplicates; shapes 1x1: 1, 1x2: 1"
    assert _line(asked, store, launcher) == line


def test_one_point_that_is_done(points: list[Point], tmp_path: Path) -> None:
    store = Store(tmp_path)
    _done(store, points[0])
    assert _line(points[:1], store) == "1 point: 0 to run, 1 done, 0 duplicates"


@pytest.mark.parametrize(
    ("changes", "is_done"),
    [
        pytest.param({"status": "ok"}, True, id="a result"),
        pytest.param({"status": "oom"}, True, id="out of memory is a result"),
        pytest.param({"status": "failed"}, False, id="failed"),
        pytest.param({"status": "timeout"}, False, id="out of time"),
        pytest.param({"status": "lost"}, False, id="lost"),
        pytest.param({"status": "refused"}, False, id="what was missing may be there now"),
        pytest.param({"environment_id": "0" * 12}, False, id="of another environment"),
    ],
)
def test_what_a_record_makes_unnecessary(
    points: list[Point], tmp_path: Path, changes: dict[str, str], is_done: bool
) -> None:
    store = Store(tmp_path)
    record = _done(store, points[0], **changes)
    plan = plan_sweep(points[:1], _Launcher(), store, name="demo", rerun=False)
    assert dict(plan.done) == ({points[0].trial_id: record} if is_done else {})
    assert [task.trial_id for task in plan.to_run] == ([] if is_done else [points[0].trial_id])


def test_rerun_runs_what_is_done_but_not_what_is_in_flight(points: list[Point], tmp_path: Path) -> None:
    store = Store(tmp_path)
    for point in points:
        _done(store, point)
    launcher = _Launcher(flying=frozenset({points[1].trial_id}))
    plan = plan_sweep(points, launcher, store, name="demo", rerun=True)
    assert [task.trial_id for task in plan.to_run] == [
        points[0].trial_id,
        points[2].trial_id,
        points[3].trial_id,
    ]
    assert [flight.task.trial_id for flight in plan.in_flight] == [points[1].trial_id]


def test_what_was_collected_is_done_whatever_it_came_to(points: list[Point], tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = _done(store, points[0], status="lost")
    plan = plan_sweep(
        points[:1], _Launcher(landed={points[0].trial_id: record}), store, name="demo", rerun=True
    )
    assert (dict(plan.done), plan.to_run) == ({points[0].trial_id: record}, [])


def test_tasks_are_told_apart_by_what_differs(points: list[Point], tmp_path: Path) -> None:
    plan = plan_sweep(points[:2], _Launcher(), Store(tmp_path), name="demo", rerun=False)
    assert [task.label for task in plan.to_run] == ["none on single, mlp", "none on shard2, mlp"]


def test_a_task_knows_its_place_and_the_address_of_its_environment_there(
    points: list[Point], tmp_path: Path
) -> None:
    plan = plan_sweep(points[:2], _Launcher(), Store(tmp_path), name="demo", rerun=False)
    assert [(task.place, task.environment_id) for task in plan.to_run] == [(PLACE, ADDRESS)] * 2
