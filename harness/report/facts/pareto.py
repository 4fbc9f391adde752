"""Trials worth choosing: the Pareto front of memory against time, and what dominates the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from harness.records.statistics import Ratio

if TYPE_CHECKING:
    from harness.report.facts.sweep_records import Entry

_BELIEVED = ("neutral", "unverified")
"""A wrong result is no result, and a strategy that did nothing offers nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeOff:
    """A trial in the plane. `ratio`: step time over the baseline's."""

    entry: Entry
    peak_bytes: int
    ratio: Ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoFront:
    """The points of one setting.

    Fields:
        best: not dominated, least memory first.
        dominated: trial_id to the point that dominates it with the least memory.
        as_on_gpu: points of a CPU whose peaks are what a GPU would need, least memory first; they are
            compared with nothing.
    """

    best: tuple[TradeOff, ...]
    dominated: Mapping[str, TradeOff]
    points: tuple[TradeOff, ...]
    as_on_gpu: tuple[TradeOff, ...]


def pareto_front(entries: Iterable[Entry]) -> ParetoFront:
    """Return the front of comparable trials; those without memory or time are left out."""
    known = sorted(_points(entries), key=lambda point: (point.peak_bytes, point.ratio.median))
    points = [point for point in known if not point.entry.is_as_on_gpu]
    dominated = {
        point.entry.trial_id: by for point in points if (by := _dominator(point, points)) is not None
    }
    best = tuple(point for point in points if point.entry.trial_id not in dominated)
    return ParetoFront(
        best=best,
        dominated=dominated,
        points=tuple(points),
        as_on_gpu=tuple(point for point in known if point.entry.is_as_on_gpu),
    )


def dominates(one: TradeOff, other: TradeOff) -> bool:
    """Return whether `one` needs no more memory and no more time than `other`, and clearly less of either.

    Less time counts where the intervals do not meet: machine noise dominates nothing.
    """
    if one.peak_bytes > other.peak_bytes or one.ratio.median > other.ratio.median:
        return False
    return one.peak_bytes < other.peak_bytes or one.ratio.high < other.ratio.low


def _points(entries: Iterable[Entry]) -> Iterable[TradeOff]:
    for entry in entries:
        memory, time = entry.record.memory, entry.record.time
        if memory is None or time is None or time.ratio_to_baseline is None:
            continue
        if entry.record.verdict in _BELIEVED:
            yield TradeOff(entry=entry, peak_bytes=memory.peak_bytes, ratio=time.ratio_to_baseline)


def _dominator(point: TradeOff, points: Sequence[TradeOff]) -> TradeOff | None:
    """Return the first of `points`, which stand in order of memory, that dominates `point`."""
    candidates = takewhile(lambda other: other.peak_bytes <= point.peak_bytes, points)
    return next((other for other in candidates if other is not point and dominates(other, point)), None)
