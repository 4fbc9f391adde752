"""A search over the points of a sweep: a few plans are predicted, chosen by what the others have shown.

The points are the space: their fields that differ are its dimensions, so what a sweep cannot compose is never
asked for. Two objectives are lowered at once: the peak's bytes, and the step time where hardware is named, or
else the step's FLOPs.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.errors import optional_package
from harness.launchers.task import Point
from harness.predict.hardware import Hardware
from harness.report.content.plan_table import PlannedPoint
from harness.report.facts import quantities

_PATIENCE = 20
"""Proposals in a row that were predicted before, after which the search has seen what it looks for."""

Costs = tuple[float, float]
"""Bytes at the peak, and seconds or FLOPs of a step."""

_Candidate = tuple[Point, Hardware | None]


class Proposal(Protocol):
    """One question of a study, whose answers are a point."""

    def number(self, name: str, values: Sequence[float]) -> int:
        """Return the index of one of `values`, which are in order."""

    def word(self, name: str, values: Sequence[str]) -> int:
        """Return the index of one of `values`, which have no order."""


class Study(Protocol):
    """Proposes points, and learns what they cost."""

    def ask(self) -> Proposal:
        """Return the next proposal."""

    def tell(self, proposal: Proposal, costs: Costs | None) -> None:
        """Learn what a proposal costs; `None` where it has no costs."""


def searched(
    candidates: Sequence[_Candidate],
    count: int,
    predict: Callable[[_Candidate], PlannedPoint],
    study: Study | None = None,
) -> list[PlannedPoint]:
    """Return the rows of `count` points, in the order in which they were chosen; all where there are no more.

    Args:
        candidates: all points of the sweep, with the hardware of each.
        count: number of predictions, >= 1.
        study: chooses; by default one of optuna.

    Raises:
        MissingPackageError: optuna is not installed.
    """
    if study is None:
        optional_package("optuna", where="search", extra="search")
        # loaded where it is asked for: it imports optuna
        study = importlib.import_module("harness.sweep.optuna_study").OptunaStudy(count)
    if count >= len(candidates):  # a study proposes some points often, and others never
        return [predict(each) for each in candidates]
    space = _Space(candidates)
    rows: dict[int, PlannedPoint] = {}
    repeated = 0
    while len(rows) < min(count, len(candidates)) and repeated < _PATIENCE:
        proposal = study.ask()
        number = space.chosen(proposal)
        repeated = repeated + 1 if number in rows else 0
        if number not in rows:
            rows[number] = predict(candidates[number])
        study.tell(proposal, costs_of(rows[number]))
    return list(rows.values())


def costs_of(row: PlannedPoint) -> Costs | None:
    """Return what a point costs; `None` where nothing is predicted."""
    work, peak = row.record.work, quantities.PEAK.of(row.record)
    if peak is None or work is None:
        return None
    step_s = quantities.STEP_TIME.of(row.record)
    return peak, float(work.step_flops) if step_s is None else step_s


def front(rows: Sequence[PlannedPoint]) -> list[PlannedPoint]:
    """Return the rows that no other one undercuts in one cost and meets in the other, by their peaks."""
    known = [(costs, row) for row in rows if (costs := costs_of(row)) is not None]
    best = [
        (costs, row)
        for costs, row in known
        if not any(other != costs and other[0] <= costs[0] and other[1] <= costs[1] for other, _ in known)
    ]
    return [row for _, row in sorted(best, key=lambda each: each[0])]


@dataclass(frozen=True, slots=True)
class _Space:
    """The points by the values of the fields in which they differ."""

    candidates: Sequence[_Candidate]
    _values: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        values = [_flat(point, hardware) for point, hardware in self.candidates]
        object.__setattr__(self, "_values", values)

    def chosen(self, proposal: Proposal) -> int:
        """Return the number of the point that a proposal describes.

        Fields are asked for one after the other, each for the values that are left: so the options of one
        variant are no dimension of another.
        """
        left = list(range(len(self.candidates)))
        for name in dict.fromkeys(name for each in self._values for name in each):
            found: dict[str, Any] = {
                json.dumps(self._values[number].get(name)): self._values[number].get(name) for number in left
            }
            if len(found) == 1:
                continue
            options = list(found)
            # the same name with other values would be another dimension to a study
            label = f"{name} of {', '.join(options)}"
            if all(type(value) in (int, float) for value in found.values()):
                options.sort(key=found.__getitem__)
                place = proposal.number(label, [found[option] for option in options])
            else:
                place = proposal.word(label, options)
            left = [n for n in left if json.dumps(self._values[n].get(name)) == options[place]]
        return left[0]


def _flat(point: Point, hardware: Hardware | None) -> dict[str, Any]:
    """Return the values of an experiment by their paths, the names of variants first."""
    pairs = dict(_leaves(point.resolved))
    names = {name: value for name, value in pairs.items() if name.endswith(".name")}
    return {**names, "hardware": None if hardware is None else hardware.name, **pairs}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
