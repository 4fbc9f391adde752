"""Figures with a line: memory through a step, what a chunk budget buys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from harness.records.measured import Moment
from harness.report.content.columns import PHASES
from harness.report.content.figures.encodings import MIB, paths_of, row_of, tip, variant_colour
from harness.report.facts import quantities
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import Entry, SweepRecords

_MOST_LINES = 10  # of a panel
_MOST_PANELS = 6


def timeline_figure(sweep: SweepRecords) -> Figure | None:
    """Return memory through the step, a panel a mesh and a line a trial, with where each peak was reached."""
    places = {
        sweep.where(entries[0]): found for entries in sweep.by_setting.values() if (found := _known(entries))
    }
    chosen = dict(list(places.items())[:_MOST_PANELS])
    rows = [
        row | {"place": place}
        for place, entries in chosen.items()
        for entry in entries[:_MOST_LINES]
        for row in _moments(entry)
    ]
    if not rows:
        return None
    lines = sum(len(entries[:_MOST_LINES]) for entries in chosen.values())
    total = sum(map(len, places.values()))
    more = "" if lines == total else f" {lines} of {total} trials."
    y = {"field": "mib", "type": "quantitative", "title": "MiB"}
    shared = {
        "x": _phase_axis(),
        "y": y,
        "color": variant_colour(sweep, rows),
        "detail": {"field": "name"},
        "tooltip": [tip("name", "trial"), tip("where", "in"), tip("bytes", "bytes", ",d")],
    }
    marks = {"x": {"datum": 1, "type": "quantitative"}}, {"x": {"datum": 2, "type": "quantitative"}}
    layers = [
        *(
            {
                "data": {"values": [{}]},  # one rule, not one for each stay
                "mark": {"type": "rule", "strokeDash": [3, 3], "aria": False},
                "encoding": mark,
            }
            for mark in marks
        ),
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": shared},
        {"mark": {"type": "point", "opacity": 0, "size": 60}, "encoding": shared},
        {
            "transform": [{"filter": "datum.is_peak"}],
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": shared,
        },
    ]
    return Figure(
        key="timeline",
        title="Memory through a step",
        about=(
            "The highest total of live storages in each stay in a module, on the rank with the highest peak; "
            f"a panel a mesh. Phases are drawn equally long. Dots are the peaks; hover says where.{more}"
        ),
        spec={
            "transform": [{"calculate": f"datum.bytes / {MIB}", "as": "mib"}],
            "facet": {"field": "place", "type": "nominal", "title": None, "sort": list(chosen)},
            "spec": {"height": 240, "layer": layers},
        },
        rows=tuple(rows),
        paths={"bytes": quantities.timeline_bytes("{moment}").path},
    )


def _known(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if _timeline(entry)]


def _moments(entry: Entry) -> Iterator[dict[str, Any]]:
    """Yield the row of each stay; `at` is its phase and, behind the point, how far into the phase it is."""
    moments = _timeline(entry)
    peak = max(moment.bytes for moment in moments)
    lengths = Counter(moment.phase for moment in moments)
    before: Counter[str] = Counter()
    for number, moment in enumerate(moments):
        phase = PHASES.index(moment.phase) if moment.phase in PHASES else 0
        yield {
            "trial_id": entry.trial_id,
            "name": entry.name,
            "variant": entry.family,
            "moment": number,
            "at": round(phase + (before[moment.phase] + 0.5) / lengths[moment.phase], 4),
            "bytes": moment.bytes,
            "where": f"{moment.phase}, {moment.module}",
            "is_peak": moment.bytes == peak,
        }
        before[moment.phase] += 1


def _phase_axis() -> dict[str, Any]:
    middles = [index + 0.5 for index in range(len(PHASES))]
    return {
        "field": "at",
        "type": "quantitative",
        "title": None,
        "scale": {"domain": [0, len(PHASES)], "nice": False},
        "axis": {
            "values": middles,
            "grid": False,
            "ticks": False,
            "labelExpr": f"{list(PHASES)!r}[floor(datum.value)]",
        },
    }


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
        row | {"place": sweep.where(entry)}
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
                "color": variant_colour(sweep, rows),
                "strokeDash": {"field": "place", "type": "nominal", "title": "where"},
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
