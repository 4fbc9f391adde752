"""What a sweep still has to do: distinct points, without those that are done, by resource shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.launchers.base import Flight, Launcher
from harness.launchers.resource_shape import by_shape, shapes_in_words
from harness.launchers.task import Point, Task
from harness.measure.environment import describe, environment_id
from harness.records.record import Record
from harness.records.store import Store
from harness.report.facts.labels import point_labels
from harness.trial.preflight import device_type


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What happens with every point of a sweep.

    Fields:
        total: points that were asked for.
        refused: distinct points that may not run, with their labels.
        to_run: trials to hand over.
        in_flight: trials that an earlier command handed over and that have not ended.
        done: records of the rest, by trial_id.
    """

    total: int
    refused: Sequence[tuple[Point, str]]
    to_run: Sequence[Task]
    in_flight: Sequence[Flight]
    done: Mapping[str, Record]

    @property
    def distinct(self) -> int:
        """Points that differ."""
        return len(self.refused) + len(self.to_run) + len(self.in_flight) + len(self.done)

    def __str__(self) -> str:
        """One line: `24 points: 18 to run, 4 done, 2 duplicates; shapes 1x1: 6, 1x2: 8, 2x4: 4`."""
        counts = {
            "to run": len(self.to_run),
            "done": len(self.done),
            "in flight": len(self.in_flight),
            "refused": len(self.refused),
            "duplicates": self.total - self.distinct,
        }
        usual = ("to run", "done", "duplicates")
        parts = [f"{count} {what}" for what, count in counts.items() if count or what in usual]
        shapes = by_shape((task.shape, task) for task in self.to_run)
        words = shapes_in_words({shape: len(tasks) for shape, tasks in shapes.items()})
        points = "point" if self.total == 1 else "points"
        return f"{self.total} {points}: {', '.join(parts)}" + (f"; shapes {words}" if words else "")


def plan_sweep(points: Sequence[Point], launcher: Launcher, store: Store, *, name: str, rerun: bool) -> Plan:
    """Return what a sweep still has to do; the caller holds the sweep's lock.

    Args:
        points: all that were asked for, duplicates included.
        launcher: that will run them; it says what an earlier submission came to.
        store: of the sweep.
        name: of the sweep.
        rerun: whether finished trials run again.
    """
    distinct = {point.trial_id: point for point in points}
    labels = point_labels([point.resolved for point in distinct.values()])
    experiments = [point.experiment for point in distinct.values() if point.experiment is not None]
    places = {(experiment.mesh, experiment.files): experiment for experiment in experiments}
    addresses = {
        place: environment_id(describe(device_type(each.mesh), each.files) | launcher.place(each.mesh))
        for place, each in places.items()
    }
    tasks, refused = [], []
    for point, label in zip(distinct.values(), labels, strict=True):
        if point.experiment is None:
            refused.append((point, label))
            continue
        tasks.append(
            Task(
                trial_id=point.trial_id,
                resolved=point.resolved,
                yaml=point.yaml,
                experiment=point.experiment,
                environment_id=addresses[point.experiment.mesh, point.experiment.files],
                place=launcher.place(point.experiment.mesh),
                label=label,
            )
        )
    collected = launcher.collect(store, name, tasks)
    done = dict(collected.records)
    busy = {flight.task.trial_id for flight in collected.flights} | done.keys()
    for task in tasks:
        found = None if rerun or task.trial_id in busy else store.finished(task.trial_id, task.environment_id)
        if found is not None and found.status != "refused":  # what was missing then is there now
            done[task.trial_id] = found
    to_run = [task for task in tasks if task.trial_id not in busy | done.keys()]
    return Plan(total=len(points), refused=refused, to_run=to_run, in_flight=collected.flights, done=done)
