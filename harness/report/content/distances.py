"""Trials that another one beats at its own peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.report.facts.document import LinePart
from harness.report.facts.quantities import HOST_PEAK, PEAK, RECOMPUTED_FLOPS
from harness.report.facts.sweep_records import Entry


def cheaper(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry, tuple[LinePart, ...]]]:
    """Yield each neutral trial with the cheapest other one at its peak or below, and what to say of both."""
    known = [
        entry for entry in entries if entry.record.bound is not None and entry.record.verdict == "neutral"
    ]
    for entry in known:
        others = [other for other in known if other.setting == entry.setting and _beats(other, entry)]
        best = min(others, key=lambda other: RECOMPUTED_FLOPS.of(other.record) or 0.0, default=None)
        if best is None:
            continue
        less, more = (each.number(RECOMPUTED_FLOPS) or "0" for each in (best, entry))
        yield (
            entry,
            best,
            (": ", best.trial, " has no higher peak and recomputes ", less, " in place of ", more),
        )


def _beats(other: Entry, entry: Entry) -> bool:
    """Say whether a trial recomputes less than another one within its bytes."""
    mine, theirs = (
        [quantity.of(each.record) or 0.0 for quantity in (PEAK, HOST_PEAK, RECOMPUTED_FLOPS)]
        for each in (entry, other)
    )
    return theirs[0] <= mine[0] and theirs[1] <= mine[1] and theirs[2] < mine[2]
