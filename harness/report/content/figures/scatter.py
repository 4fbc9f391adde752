"""Figures with a point a trial: memory against time, predicted against measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.content.figures.encodings import MIB, SYMBOLS, paths_of, row_of, tip, variant_colour
from harness.report.facts import quantities
from harness.report.facts.baseline import of_baselines
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import Entry, SweepRecords

_MOST_LABELLED = 14
_MOST_WHISKERS = 300
_MOST_SHAPES = 6
_AS_ON_GPU = (
    " Dashed points, named (GPU), are what a GPU would save: on a CPU host memory is the same memory, so "
    "they are compared with nothing."
)
_RINGS = SYMBOLS | {"symbolFillColor": "transparent"}
_SHAPES = {"symbolFillColor": "gray", "symbolStrokeColor": "gray"}


_Channel = Mapping[str, Any]
_Row = Mapping[str, Any]
_FRONT_COLUMNS = {
    "share": quantities.PEAK_SHARE,
    "ratio": quantities.RATIO,
    "low": quantities.RATIO_LOW,
    "high": quantities.RATIO_HIGH,
    "peak_bytes": quantities.PEAK,
}


def front_figure(sweep: SweepRecords) -> Figure | None:
    """Return peak memory against step time, both as shares of the baseline's; the front is filled."""
    numbered = enumerate(row for entries in sweep.by_setting.values() for row in _front_rows(sweep, entries))
    rows = [row | {"number": number} for number, row in numbered if "share" in row]
    if not rows:
        return None
    drawn = {row["trial_id"] for row in rows}
    owned, named = of_baselines(entry.record.experiment for entry in sweep.entries if entry.trial_id in drawn)
    tooltip = [
        tip("name", "trial"),
        tip("peak_bytes", "peak bytes", ",d"),
        tip("share", f"peak, share of {owned}", ".1%"),
        tip("ratio", "step time ratio", ".3f"),
        tip("low", "from", ".3f"),
        tip("high", "to", ".3f"),
        tip("verdict", "verdict"),
        tip("by", "front"),
    ]
    places, colour = {row["place"] for row in rows}, variant_colour(sweep, rows, _RINGS)
    fills = dict(zip(colour["scale"]["domain"], colour["scale"]["range"], strict=True))
    rows = [row | {"fill": fills[row["variant"]]} for row in rows]
    scale = {"zero": False, "padding": 14}
    x = {"field": "ratio", "type": "quantitative", "scale": scale, "axis": {"tickCount": 8}}
    y = {"field": "share", "type": "quantitative", "scale": scale, "axis": {"format": "%", "tickCount": 6}}
    points = {
        "mark": {"type": "point", "size": 90, "strokeWidth": 2, "opacity": 1},
        "encoding": {
            "x": x | {"title": f"step time, times {owned}"},
            "y": y | {"title": f"peak memory, share of {owned}"},
            "color": colour,
            "fillOpacity": {"condition": {"test": "datum.is_best", "value": 0.85}, "value": 0},
            "fill": {"field": "fill", "type": "nominal", "scale": None, "legend": None},
            "strokeDash": {"condition": {"test": "datum.is_as_on_gpu", "value": [2, 2]}, "value": [1, 0]},
            "tooltip": tooltip,
        }
        | (
            {"shape": {"field": "place", "type": "nominal", "title": "where", "legend": _SHAPES}}
            if 1 < len(places) <= _MOST_SHAPES
            else {}
        ),
    }
    layers = [*_whiskers(rows, x, y, colour), points, *_labels(rows, x, y)]
    return Figure(
        key="front",
        title="Memory against time",
        about=(
            "Down and left is better. Filled points are not dominated: nothing else needs as little memory "
            f"in as little time. Bars are 95 % intervals. At 1 and 100 % is {named}. "
            "Trials that differ or are inert are left out."
            f"{_AS_ON_GPU if any(row['is_as_on_gpu'] for row in rows) else ''}"
        ),
        spec={"height": 380, "layer": layers},
        rows=tuple(rows),
        paths=paths_of(_FRONT_COLUMNS),
    )


def _front_rows(sweep: SweepRecords, entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    found = sweep.fronts[entries[0].setting]
    for point in (*found.points, *found.as_on_gpu):
        entry, by = point.entry, found.dominated.get(point.entry.trial_id)
        is_labelled = by is None and not entry.is_baseline
        standing = "not dominated" if by is None else f"dominated by {by.entry.name}"
        yield row_of(entry, _FRONT_COLUMNS) | {
            "place": sweep.where(entry),
            "by": "what a GPU would save" if entry.is_as_on_gpu else standing,
            "is_best": by is None and not entry.is_as_on_gpu,
            "is_as_on_gpu": entry.is_as_on_gpu,
            "label": f"{entry.choice}{' (GPU)' if entry.is_as_on_gpu else ''}" if is_labelled else "",
            "verdict": entry.record.verdict,
        }


def _whiskers(rows: Sequence[_Row], x: _Channel, y: _Channel, colour: _Channel) -> Iterator[dict[str, Any]]:
    """Yield the layer of intervals, unless there are too many to tell apart."""
    if len(rows) <= _MOST_WHISKERS:
        ends = {"x": {**x, "field": "low", "title": ""}, "x2": {"field": "high"}, "y": {**y, "title": ""}}
        yield {"mark": {"type": "rule", "opacity": 0.35}, "encoding": {**ends, "color": colour}}


def _labels(rows: Sequence[_Row], x: _Channel, y: _Channel) -> Iterator[dict[str, Any]]:
    """Yield the names of points on the front, in turns above and below: neighbours are often close.

    There are none where there are too many to read.
    """
    labelled = [row["number"] for row in rows if row["label"]]
    for parity in sorted({number % 2 for number in labelled}) if len(labelled) <= _MOST_LABELLED else ():
        yield {
            "transform": [{"filter": f"datum.label && datum.number % 2 == {parity}"}],
            "mark": {"type": "text", "align": "left", "dx": 9, "dy": -8 if parity else 12},
            "encoding": {"x": {**x, "title": ""}, "y": {**y, "title": ""}, "text": {"field": "label"}},
        }


def prediction_figure(sweep: SweepRecords) -> Figure | None:
    """Return predicted against measured peak; on the diagonal they agree."""
    columns = {"predicted": quantities.PREDICTED_PEAK, "measured": quantities.PEAK}
    rows = [row for entry in sweep.entries if "predicted" in (row := row_of(entry, columns))]
    if not rows:
        return None
    ends = [min(row["measured"] for row in rows) / MIB, max(row["measured"] for row in rows) / MIB]
    log = {"type": "log"}
    diagonal = {
        "data": {"values": [{"at": end} for end in ends]},
        "mark": {"type": "line", "strokeDash": [4, 4], "opacity": 0.5},
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "scale": log},
            "y": {"field": "at", "type": "quantitative", "scale": log},
        },
    }
    points = {
        "transform": [
            {"calculate": f"datum.predicted / {MIB}", "as": "x"},
            {"calculate": f"datum.measured / {MIB}", "as": "y"},
        ],
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "predicted peak, MiB", "scale": log},
            "y": {"field": "y", "type": "quantitative", "title": "measured peak, MiB", "scale": log},
            "color": variant_colour(sweep, rows),
            "tooltip": [
                tip("name", "trial"),
                tip("predicted", "predicted bytes", ",d"),
                tip("measured", "measured bytes", ",d"),
            ],
        },
    }
    return Figure(
        key="prediction",
        title="Predicted and measured peak",
        about="On the dashed diagonal, what was predicted before the trial ran is what was measured.",
        spec={"height": 320, "layer": [diagonal, points]},
        rows=tuple(rows),
        paths=paths_of(columns),
    )
