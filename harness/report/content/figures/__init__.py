"""The figures of a report, as Vega-Lite specifications over rows of exact numbers."""

from __future__ import annotations

from harness.report.content.figures.bars import memory_figure, work_figure
from harness.report.content.figures.curves import chunk_figure, timeline_figure
from harness.report.content.figures.scatter import front_figure, prediction_figure
from harness.report.content.figures.schedules import schedule_figure
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import Entry, SweepRecords

MOST_BARS = 40
"""Trials in a figure that has a bar a trial; all are in the tables."""


def figures(sweep: SweepRecords) -> tuple[Figure, ...]:
    """Return the figures that the records have numbers for."""
    shown = _shown(sweep)
    found = (
        front_figure(sweep),
        memory_figure(shown),
        timeline_figure(sweep),
        schedule_figure(sweep),
        work_figure(shown),
        prediction_figure(sweep),
        *(chunk_figure(sweep, option) for option in ("budget_mib", "fraction")),
    )
    return tuple(figure for figure in found if figure is not None)


def _shown(sweep: SweepRecords) -> tuple[Entry, ...]:
    if len(sweep.entries) <= MOST_BARS:
        return sweep.entries
    largest = max(sweep.by_setting.values(), key=len)
    measured = [entry for entry in largest if entry.record.memory is not None]
    lowest = sorted(measured, key=lambda entry: entry.record.memory.peak_bytes if entry.record.memory else 0)
    return tuple(lowest[:MOST_BARS])
