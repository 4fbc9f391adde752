"""Figures with a line: memory through a step, what a chunk budget buys."""

from __future__ import annotations

from collections.abc import Sequence

from harness.records.measured import Moment
from harness.report.content.figures.encodings import MIB, SYMBOLS, paths_of, row_of, tip
from harness.report.facts import quantities
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import Entry, SweepRecords

_MOST_LINES = 10


def timeline_figure(entries: Sequence[Entry]) -> Figure | None:
    """Return memory through the step, a line a trial, with where each peak was reached."""
    known = [(entry, moments) for entry in entries if (moments := _timeline(entry))]
    rows = [
        {
            "trial_id": entry.trial_id,
            "name": entry.name,
            "moment": number,
            "bytes": moment.bytes,
            "where": f"{moment.phase}, {moment.module}",
            "is_peak": moment.bytes == peak,
        }
        for entry, moments in known[:_MOST_LINES]
        for peak in [max(moment.bytes for moment in moments)]
        for number, moment in enumerate(moments)
    ]
    if not rows:
        return None
    shared = {
        "x": {"field": "moment", "type": "quantitative", "title": "stays in modules, in order of time"},
        "y": {"field": "mib", "type": "quantitative", "title": "MiB"},
        "color": {"field": "name", "type": "nominal", "title": "trial", "legend": SYMBOLS},
        "tooltip": [tip("name", "trial"), tip("where", "in"), tip("bytes", "bytes", ",d")],
    }
    layers = [
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": shared},
        {"mark": {"type": "point", "opacity": 0, "size": 60}, "encoding": shared},
        {
            "transform": [{"filter": "datum.is_peak"}],
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": shared,
        },
    ]
    more = "" if len(known) <= _MOST_LINES else f" The first {_MOST_LINES} of {len(known)} trials."
    return Figure(
        key="timeline",
        title="Memory through a step",
        about=(
            "The highest total of live storages in each stay in a module: forward, backward, optimizer, on "
            f"the rank with the highest peak. Dots are the peaks; hover says where.{more}"
        ),
        spec={
            "height": 340,
            "transform": [{"calculate": f"datum.bytes / {MIB}", "as": "mib"}],
            "layer": layers,
        },
        rows=tuple(rows),
        paths={"bytes": quantities.timeline_bytes("{moment}").path},
    )


def _timeline(entry: Entry) -> tuple[Moment, ...]:
    return () if entry.record.memory is None else entry.record.memory.timeline


def chunk_figure(sweep: SweepRecords, option: str) -> Figure | None:
    """Return activation peak and step time against the budget that chunking was given."""
    columns = {
        "budget": quantities.chunk_option(option),
        "activations": quantities.ACTIVATION_PEAK,
        "ratio": quantities.RATIO,
    }
    rows = [
        row | {"place": sweep.where(entry), "variant": entry.family}
        for entry in sweep.entries
        if entry.record.memory is not None
        and {"budget", "activations"} <= (row := row_of(entry, columns)).keys()
    ]
    if len(rows) < 2:  # noqa: PLR2004 (a curve has two points)
        return None
    unit = "MiB" if option == "budget_mib" else "share of the unchunked peak"
    return Figure(
        key=f"chunk-{option.replace('_', '-')}",
        title="Chunk curve",
        about="What the activations of a step take at their peak when chunking is given a budget.",
        spec={
            "height": 300,
            "transform": [{"calculate": f"datum.activations / {MIB}", "as": "mib"}],
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "budget", "type": "quantitative", "title": f"budget, {unit}"},
                "y": {"field": "mib", "type": "quantitative", "title": "activation peak, MiB"},
                "color": {"field": "place", "type": "nominal", "title": "where"},
                "detail": {"field": "variant"},
                "tooltip": [
                    tip("name", "trial"),
                    tip("budget", "budget"),
                    tip("activations", "activation peak bytes", ",d"),
                    tip("ratio", "step time ratio", ".3f"),
                ],
            },
        },
        rows=tuple(rows),
        paths=paths_of(columns),
    )
