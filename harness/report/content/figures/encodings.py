"""What figures share: rows of exact numbers, tooltips, an axis of names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry

MIB = 1024 * 1024
BAR_HEIGHT = 20
"""Pixels of a trial in a figure that has a bar a trial."""

SYMBOLS = {"symbolOpacity": 1, "symbolStrokeWidth": 3}
"""Legend of marks that are faint themselves."""


def row_of(entry: Entry, columns: Mapping[str, Quantity]) -> dict[str, Any]:
    """Return the numbers of a trial; what it has none of, or none that JSON has, is left out."""
    found = ((column, quantity.of(entry.record)) for column, quantity in columns.items())
    numbers = {column: value for column, value in found if value is not None and math.isfinite(value)}
    return {"trial_id": entry.trial_id, "name": entry.name} | numbers


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
