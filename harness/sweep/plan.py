"""The plan of a sweep: which points are refused, finished, on their way, and still to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.errors import PredictedOomError
from harness.experiment.devices import device_type
from harness.experiment.experiment import Experiment
from harness.experiment.mesh import Mesh
from harness.launchers.base import InFlight, Launcher
from harness.launchers.resource_shape import by_shape, shapes_in_words
from harness.launchers.task import Point, Task
from harness.measure.environment import environment_id, identity
from harness.records.record import Record, never_ran
from harness.records.store import Store, trial_id
from harness.report.facts.labels import point_labels


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The fate of every point of a sweep.

    Fields:
        refused: distinct points that may not run, with their labels.
        to_run: trials to hand over.
        in_flight: trials that an earlier command started and that have not ended.
        done: records of the rest, by trial_id.
    """

    total: int
    refused: Sequence[tuple[Point, str]]
    to_run: Sequence[Task]
    in_flight: Sequence[InFlight]
    done: Mapping[str, Record]

    @property
    def distinct(self) -> int:
        """Points that differ."""
        return len(self.refused) + len(self.to_run) + len(self.in_flight) + len(self.done)

    @property
    def _predicted_oom(self) -> int:
        return sum(isinstance(point.refusal, PredictedOomError) for point, _ in self.refused)

    def __str__(self) -> str:
        """One line: `24 points: 18 to run, 4 done, 2 duplicates; shapes 1x1: 6, 1x2: 8, 2x4: 4`."""
        counts = {
            "to run": len(self.to_run),
            "done": len(self.done),
            "in flight": len(self.in_flight),
            "refused": len(self.refused) - self._predicted_oom,
            "predicted out of memory": self._predicted_oom,
            "duplicates": self.total - self.distinct,
        }
        usual = ("to run", "done", "duplicates")
        parts = [f"{count} {what}" for what, count in counts.items() if count or what in usual]
        shapes = by_shape((task.shape, task) for task in self.to_run)
        words = shapes_in_words({shape: len(tasks) for shape, tasks in shapes.items()})
        points = "point" if self.total == 1 else "points"
        return f"{self.total} {points}: {', '.join(parts)}" + (f"; shapes {words}" if words else "")


def finished_before(store: Store, launcher: Launcher, *, rerun: bool) -> Callable[[Experiment], bool]:
    """Return a function that says whether an experiment has a finished record and need not run.

    Args:
        rerun: whether finished trials run again; then nothing counts as finished.
    """
    address = _addresses(launcher)

    def is_done(experiment: Experiment) -> bool:
        if rerun or not store.root.is_dir():  # a new sweep, whose points need not be addressed
            return False
        return _record(store, trial_id(experiment.to_dict()), address(experiment)) is not None

    return is_done


def plan_sweep(
    points: Sequence[Point], launcher: Launcher, store: Store, *, name: str, rerun: bool
) -> SweepPlan:
    """Return what a sweep still has to do; the caller holds the sweep's lock.

    Args:
        points: all that were asked for, duplicates included.
        launcher: launcher that will run them; it says what an earlier submission came to.
        rerun: whether finished trials run again.
    """
    distinct = {point.trial_id: point for point in points}
    labels = point_labels([point.resolved for point in distinct.values()])
    address = _addresses(launcher)
    tasks, refused = [], []
    for point, label in zip(distinct.values(), labels, strict=True):
        if point.experiment is None:
            refused.append((point, label))
        else:
            tasks.append(_task(point, point.experiment, label, address(point.experiment), launcher))
    collected = launcher.collect(store, name, tasks)
    done = dict(collected.records)
    busy = {flight.task.trial_id for flight in collected.flights} | done.keys()
    if not rerun:
        done |= _finished([task for task in tasks if task.trial_id not in busy], store)
    return SweepPlan(
        total=len(points),
        refused=refused,
        to_run=[task for task in tasks if task.trial_id not in busy | done.keys()],
        in_flight=collected.flights,
        done=done,
    )


def _task(point: Point, experiment: Experiment, label: str, address: str, launcher: Launcher) -> Task:
    return Task(
        trial_id=point.trial_id,
        resolved=point.resolved,
        yaml=point.yaml,
        experiment=experiment,
        environment_id=address,
        place=launcher.place(experiment.mesh),
        label=label,
        hardware=point.hardware,
    )


def _addresses(launcher: Launcher) -> Callable[[Experiment], str]:
    """Return a function from an experiment to its environment_id; environments are looked at once."""

    @cache
    def address(mesh: Mesh, files: tuple[Path, ...]) -> str:
        return environment_id(identity(device_type(mesh), files) | launcher.place(mesh))

    return lambda experiment: address(experiment.mesh, experiment.files)


def _finished(tasks: Sequence[Task], store: Store) -> dict[str, Record]:
    """Return the records of those trials that need not run, by trial_id."""
    found = {task.trial_id: _record(store, task.trial_id, task.environment_id) for task in tasks}
    return {trial: record for trial, record in found.items() if record is not None}


def _record(store: Store, trial: str, environment: str) -> Record | None:
    """Return a trial's finished record, unless it never ran: what was missing then may be there now."""
    found = store.finished(trial, environment)
    return None if found is None or never_ran(found) else found
