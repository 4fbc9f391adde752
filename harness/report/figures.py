"""The figures of a report, as Vega-Lite specifications over rows of exact numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.record import is_baseline
from harness.report.document import Figure
from harness.report.front import front
from harness.report.sweep import Entry, Sweep
from harness.report.words import Unit

MOST_BARS = 40
"""Trials in a figure that has a bar a trial; all are in the tables."""

_MOST_LABELLED = 14
_MOST_WHISKERS = 300
_MOST_SHAPES = 6
_KINDS = {
    "parameters": "memory/parameter_bytes",
    "gradients": "memory/gradient_bytes",
    "optimizer": "memory/optimizer_bytes",
    "saved": "memory/saved_bytes",
}
_BAR_HEIGHT = 20
_MIB = 1024 * 1024


def figures(sweep: Sweep) -> tuple[Figure, ...]:
    """Return the figures that the records have numbers for."""
    shown = _shown(sweep)
    found = (
        front_figure(sweep),
        memory_figure(shown),
        work_figure(shown),
        prediction_figure(sweep),
        *(chunk_figure(sweep, option) for option in ("budget_mib", "fraction")),
    )
    return tuple(figure for figure in found if figure is not None)


def front_figure(sweep: Sweep) -> Figure | None:
    """Return peak memory against step time, both as shares of the plain model's; the front is filled."""
    columns = {
        "share": "memory/peak_bytes : memory/baseline/peak_bytes",
        "ratio": "time/ratio_to_baseline/median",
        "low": "time/ratio_to_baseline/low",
        "high": "time/ratio_to_baseline/high",
        "peak_bytes": "memory/peak_bytes",
    }
    rows = []
    for entries in sweep.by_setting.values():
        found = front(entries)
        for point in found.points:
            by, experiment = found.dominated.get(point.entry.trial_id), point.entry.record.experiment
            rows.append(
                _row(point.entry, columns)
                | {
                    "variant": point.entry.variant.split(" ")[0],
                    "place": sweep.place(point.entry),
                    "by": "not dominated" if by is None else f"dominated by {by.entry.name}",
                    "is_best": by is None,
                    "label": point.entry.name if by is None and not is_baseline(experiment) else "",
                    "verdict": point.entry.record.verdict,
                }
            )
    rows = [row for row in rows if "share" in row]
    if not rows:
        return None
    tooltip = [
        _tip("name", "trial"),
        _tip("peak_bytes", "peak bytes", ",d"),
        _tip("share", "of the plain model's peak", ".1%"),
        _tip("ratio", "step time ratio", ".3f"),
        _tip("low", "from", ".3f"),
        _tip("high", "to", ".3f"),
        _tip("verdict", "verdict"),
        _tip("by", "front"),
    ]
    places = {row["place"] for row in rows}
    scale = {"zero": False, "padding": 14}
    x = {"field": "ratio", "type": "quantitative", "scale": scale}
    y = {"field": "share", "type": "quantitative", "scale": scale, "axis": {"format": "%"}}
    points = {
        "mark": {"type": "point", "size": 90, "strokeWidth": 2, "opacity": 1},
        "encoding": {
            "x": x | {"title": "step time, times the plain model's"},
            "y": y | {"title": "peak memory, share of the plain model's"},
            "color": {"field": "variant", "type": "nominal", "title": "variant"},
            "fillOpacity": {"condition": {"test": "datum.is_best", "value": 0.85}, "value": 0},
            "fill": {"field": "variant", "type": "nominal", "legend": None},
            "tooltip": tooltip,
        }
        | (
            {"shape": {"field": "place", "type": "nominal", "title": "where"}}
            if 1 < len(places) <= _MOST_SHAPES
            else {}
        ),
    }
    layers: list[dict[str, Any]] = [points]
    if len(rows) <= _MOST_WHISKERS:
        whiskers = {"x": x | {"field": "low", "title": ""}, "x2": {"field": "high"}, "y": y | {"title": ""}}
        colour = {"color": {"field": "variant", "type": "nominal"}}
        layers.insert(0, {"mark": {"type": "rule", "opacity": 0.35}, "encoding": whiskers | colour})
    if sum(bool(row["label"]) for row in rows) <= _MOST_LABELLED:
        layers.append(
            {
                "transform": [{"filter": "datum.label"}],
                "mark": {"type": "text", "align": "left", "dx": 9, "dy": -7},
                "encoding": {"x": x | {"title": ""}, "y": y | {"title": ""}, "text": {"field": "label"}},
            }
        )
    return Figure(
        key="front",
        title="Memory against time",
        about=(
            "Down and left is better. Filled points are not dominated: nothing else needs as little memory "
            "in as little time. Bars are 95 % intervals. The plain model is at 1 and 100 %. Trials that "
            "differ or are inert are left out."
        ),
        spec={"height": 380, "layer": layers},
        rows=tuple(rows),
        paths=columns,
    )


def memory_figure(entries: Sequence[Entry]) -> Figure | None:
    """Return stacked memory by kind, a bar a trial, with the peak as a tick."""
    columns = _KINDS | {"activations": "memory/activation_peak_bytes", "peak": "memory/peak_bytes"}
    rows = [
        _row(entry, columns) | {"owner": f"{memory.peak_phase}, {memory.peak_module}"}
        for entry in entries
        if (memory := entry.record.memory) is not None
    ]
    if not rows:
        return None
    kinds = [*_KINDS, "temporary"]
    bars = {
        "transform": [
            {"calculate": "max(0, datum.activations - datum.saved)", "as": "temporary"},
            {"fold": kinds, "as": ["kind", "bytes"]},
            {"calculate": f"datum.bytes / {_MIB}", "as": "mib"},
            {"calculate": f"indexof({kinds!r}, datum.kind)", "as": "order"},
        ],
        "mark": {"type": "bar"},
        "encoding": {
            "y": _names(rows),
            "x": {"field": "mib", "type": "quantitative", "title": "MiB", "stack": "zero"},
            "color": {"field": "kind", "type": "nominal", "title": "kind", "scale": {"domain": kinds}},
            "order": {"field": "order"},
            "tooltip": [_tip("name", "trial"), _tip("kind", "kind"), _tip("bytes", "bytes", ",d")],
        },
    }
    peaks = {
        "transform": [{"calculate": f"datum.peak / {_MIB}", "as": "mib"}],
        "mark": {"type": "tick", "thickness": 3, "size": _BAR_HEIGHT},
        "encoding": {
            "y": _names(rows),
            "x": {"field": "mib", "type": "quantitative"},
            "tooltip": [
                _tip("name", "trial"),
                _tip("peak", "peak bytes", ",d"),
                _tip("owner", "reached in"),
            ],
        },
    }
    return Figure(
        key="memory",
        title="Memory by kind",
        about=(
            "Bytes on the device, maximum over ranks. Temporary is what forward and backward hold at their "
            "peak beyond what forward saved. The tick is the peak of the step: not all kinds live at the "
            "same time, so it may lie inside the bar."
        ),
        spec={"height": _bars_height(rows), "layer": [bars, peaks]},
        rows=tuple(rows),
        paths=columns,
    )


def work_figure(entries: Sequence[Entry]) -> Figure | None:
    """Return FLOPs of a step, a bar a trial: forward, backward, recomputed."""
    columns = {
        "forward": "work/forward_flops",
        "backward_all": "work/backward_flops",
        "recomputed": "work/recomputed_flops",
    }
    rows = [_row(entry, columns) for entry in entries if entry.record.work is not None]
    if not rows:
        return None
    kinds = ["forward", "backward", "recomputed"]
    return Figure(
        key="work",
        title="FLOPs of a step",
        about=(
            "Matmuls, convolutions and attention, maximum over ranks. Recomputed are forward operators that "
            "run in backward."
        ),
        spec={
            "height": _bars_height(rows),
            "transform": [
                {"calculate": "datum.backward_all - datum.recomputed", "as": "backward"},
                {"fold": kinds, "as": ["kind", "flops"]},
                {"calculate": f"indexof({kinds!r}, datum.kind)", "as": "order"},
            ],
            "mark": {"type": "bar"},
            "encoding": {
                "y": _names(rows),
                "x": {
                    "field": "flops",
                    "type": "quantitative",
                    "title": "FLOPs",
                    "stack": "zero",
                    "axis": {"format": "~s"},
                },
                "color": {"field": "kind", "type": "nominal", "title": "kind", "scale": {"domain": kinds}},
                "order": {"field": "order"},
                "tooltip": [_tip("name", "trial"), _tip("kind", "kind"), _tip("flops", "FLOPs", ",d")],
            },
        },
        rows=tuple(rows),
        paths=columns,
    )


def prediction_figure(sweep: Sweep) -> Figure | None:
    """Return predicted against measured peak; on the diagonal they agree."""
    columns = {"predicted": "memory/predicted_peak_bytes", "measured": "memory/peak_bytes"}
    rows = [row for entry in sweep.entries if "predicted" in (row := _row(entry, columns))]
    if not rows:
        return None
    ends = [min(row["measured"] for row in rows) / _MIB, max(row["measured"] for row in rows) / _MIB]
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
            {"calculate": f"datum.predicted / {_MIB}", "as": "x"},
            {"calculate": f"datum.measured / {_MIB}", "as": "y"},
        ],
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": "predicted peak, MiB", "scale": log},
            "y": {"field": "y", "type": "quantitative", "title": "measured peak, MiB", "scale": log},
            "tooltip": [
                _tip("name", "trial"),
                _tip("predicted", "predicted bytes", ",d"),
                _tip("measured", "measured bytes", ",d"),
            ],
        },
    }
    return Figure(
        key="prediction",
        title="Predicted and measured peak",
        about="On the dashed diagonal, what was predicted before the trial ran is what was measured.",
        spec={"height": 320, "layer": [diagonal, points]},
        rows=tuple(rows),
        paths=columns,
    )


def chunk_figure(sweep: Sweep, option: str) -> Figure | None:
    """Return activation peak and step time against the budget that chunking was given."""
    columns = {
        "budget": f"experiment/chunk/{option}",
        "activations": "memory/activation_peak_bytes",
        "ratio": "time/ratio_to_baseline/median",
    }
    rows = [
        row | {"place": sweep.place(entry), "variant": entry.variant.split(" ")[0]}
        for entry in sweep.entries
        if {"budget", "activations"} <= (row := _row(entry, columns)).keys()
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
            "transform": [{"calculate": f"datum.activations / {_MIB}", "as": "mib"}],
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "budget", "type": "quantitative", "title": f"budget, {unit}"},
                "y": {"field": "mib", "type": "quantitative", "title": "activation peak, MiB"},
                "color": {"field": "place", "type": "nominal", "title": "where"},
                "detail": {"field": "variant"},
                "tooltip": [
                    _tip("name", "trial"),
                    _tip("budget", "budget"),
                    _tip("activations", "activation peak bytes", ",d"),
                    _tip("ratio", "step time ratio", ".3f"),
                ],
            },
        },
        rows=tuple(rows),
        paths=columns,
    )


def _shown(sweep: Sweep) -> tuple[Entry, ...]:
    """Return the trials that get a bar each: all, or those of the largest setting with the lowest peaks."""
    if len(sweep.entries) <= MOST_BARS:
        return sweep.entries
    largest = max(sweep.by_setting.values(), key=len)
    measured = [entry for entry in largest if entry.record.memory is not None]
    lowest = sorted(measured, key=lambda entry: entry.record.memory.peak_bytes if entry.record.memory else 0)
    return tuple(lowest[:MOST_BARS])


def _row(entry: Entry, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of a trial; what it has none of is left out."""
    found = {column: entry.number(path, Unit.VALUE) for column, path in columns.items()}
    numbers = {column: number.value for column, number in found.items() if number is not None}
    return {"trial_id": entry.trial_id, "name": entry.name} | numbers


def _names(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the axis of trial names, in their order."""
    return {
        "field": "name",
        "type": "nominal",
        "sort": [row["name"] for row in rows],
        "title": None,
        "axis": {"labelLimit": 260},
    }


def _bars_height(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return pixels; Vega-Lite cannot fit a width and step a height at once."""
    return _BAR_HEIGHT * len({row["name"] for row in rows})


def _tip(column: str, title: str, number_format: str | None = None) -> dict[str, Any]:
    tip = {"field": column, "title": title}
    return tip if number_format is None else tip | {"format": number_format, "type": "quantitative"}
