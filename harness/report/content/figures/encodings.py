"""Parts that figures share: rows of exact numbers, tooltips, an axis of names."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry, SweepRecords

MIB = 1024 * 1024
BAR_HEIGHT = 20
"""Pixels of a trial in a figure that has a bar a trial."""

SYMBOLS = {"symbolOpacity": 1, "symbolStrokeWidth": 3}
"""Legend of marks that are faint themselves."""

KIND_COLOURS: Mapping[str, str] = {
    "parameters": "#806a50",
    "unsharded_parameters": "#5c4a36",
    "gradients": "#a68d6c",
    "optimizer": "#cdbd9e",
    "buffers": "#6b7280",
    "inputs": "#b0b5bd",
    "saved": "#1f8a94",
    "outputs": "#5aa9b1",
    "communication": "#8c5a7c",
    "temporary": "#93c1c5",
    "forward": "#7d8b3c",
    "backward": "#b9c47e",
    "recomputed": "#a63d2f",
}
"""Colours of kinds of bytes and of FLOPs; none is that of a variant."""

_VARIANT_COLOURS: Mapping[str, str] = {
    "none": "#8a8f98",
    "full": "#4c78e0",
    "selective_layer": "#3fae8f",
    "selective_op": "#a46be8",
    "nested": "#e0a100",
    "offload": "#f0685a",
    "budget": "#e76fae",
    "compiler_budget": "#59b8e6",
}
_GOLDEN_ANGLE, _FIRST_HUE = 0.382, 0.55  # of a whole turn


def variant_colour(
    sweep: SweepRecords, rows: Sequence[Mapping[str, Any]], legend: Mapping[str, Any] = SYMBOLS
) -> dict[str, Any]:
    """Return the colours of the variants in `rows`: the same in every figure of a sweep."""
    others = [name for name in sweep.families if name not in _VARIANT_COLOURS]
    colours = dict(_VARIANT_COLOURS) | {name: _other_colour(index) for index, name in enumerate(others)}
    names = sorted({row["variant"] for row in rows})
    return {
        "field": "variant",
        "type": "nominal",
        "title": "variant",
        "scale": {"domain": names, "range": [colours[name] for name in names]},
        "legend": legend,
    }


def _other_colour(index: int) -> str:
    """Return a dark colour far from those of the numbers before it: by the golden angle."""
    rgb = colorsys.hls_to_rgb((index * _GOLDEN_ANGLE + _FIRST_HUE) % 1, 0.36, 0.5)
    return f"#{''.join(f'{round(255 * part):02x}' for part in rgb)}"


def row_of(entry: Entry, columns: Mapping[str, Quantity]) -> dict[str, Any]:
    """Return the numbers of a trial; what it has none of, or none that JSON has, is left out."""
    found = ((column, quantity.of(entry.record)) for column, quantity in columns.items())
    numbers = {column: value for column, value in found if value is not None and math.isfinite(value)}
    return {"trial_id": entry.trial_id, "name": entry.name, "variant": entry.family} | numbers


def paths_of(columns: Mapping[str, Quantity]) -> dict[str, str]:
    """Return where the columns of `row_of` stand in the record."""
    return {column: quantity.path for column, quantity in columns.items()}


def tip(column: str, title: str, number_format: str | None = None) -> dict[str, Any]:
    """Return a line of a tooltip."""
    shown = {"field": column, "title": title}
    return shown if number_format is None else shown | {"format": number_format, "type": "quantitative"}


def names_axis(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the axis of trial names, in their order."""
    return {
        "field": "name",
        "type": "nominal",
        "sort": [row["name"] for row in rows],
        "title": None,
    }


def bars_height(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return pixels; Vega-Lite cannot fit a width and step a height at once."""
    return BAR_HEIGHT * len({row["name"] for row in rows})
