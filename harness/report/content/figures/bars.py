"""Figures with a bar a trial: memory by kind, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.records.measured import PEAK_PARTS
from harness.report.content.figures.encodings import (
    BAR_HEIGHT,
    KIND_COLOURS,
    MIB,
    bars_height,
    names_axis,
    paths_of,
    row_of,
    tip,
)
from harness.report.facts import quantities
from harness.report.facts.document import Figure
from harness.report.facts.sweep_records import Entry


def memory_figure(entries: Sequence[Entry]) -> Figure | None:
    """Return what lives at the peak of each trial, stacked by kind: a bar is as long as the peak."""
    columns = {part: quantities.peak_part(part) for part in PEAK_PARTS} | {"peak": quantities.PEAK}
    rows = [
        row_of(entry, columns) | {"owner": f"{memory.peak_phase}, {memory.peak_module}"}
        for entry in entries
        if (memory := entry.record.memory) is not None and memory.peak_parts
    ]
    if not rows:
        return None
    kinds = [part for part in PEAK_PARTS if any(row.get(part) for row in rows)]
    bars = {
        "transform": [
            {"fold": kinds, "as": ["kind", "bytes"]},
            # a trial without bytes of a kind has none in its row, and a stack ends at what is no number
            {"calculate": f"(datum.bytes || 0) / {MIB}", "as": "mib"},
            {"calculate": f"indexof({kinds!r}, datum.kind)", "as": "order"},
        ],
        "mark": {"type": "bar"},
        "encoding": {
            "y": names_axis(rows),
            "x": {"field": "mib", "type": "quantitative", "title": "MiB", "stack": "zero"},
            **_by_kind(kinds, tip("bytes", "bytes", ",d")),
        },
    }
    peaks = {
        "transform": [{"calculate": f"datum.peak / {MIB}", "as": "mib"}],
        "mark": {"type": "tick", "thickness": 3, "size": BAR_HEIGHT},
        "encoding": {
            "y": names_axis(rows),
            "x": {"field": "mib", "type": "quantitative"},
            "tooltip": [tip("name", "trial"), tip("peak", "peak bytes", ",d"), tip("owner", "reached in")],
        },
    }
    return Figure(
        key="memory",
        title="Memory by kind",
        about=(
            "Bytes on the device at the moment of the highest total of the step, on the rank where it is "
            "highest. Saved is what forward has left for backward by then, temporary all else that the step "
            "has made."
        ),
        spec={"height": bars_height(rows), "layer": [bars, peaks]},
        rows=tuple(rows),
        paths=paths_of(columns),
    )


def work_figure(entries: Sequence[Entry]) -> Figure | None:
    """Return FLOPs of a step, a bar a trial: forward, backward, recomputed."""
    columns = {
        "forward": quantities.FORWARD_FLOPS,
        "backward_all": quantities.BACKWARD_FLOPS,
        "recomputed": quantities.RECOMPUTED_FLOPS,
    }
    rows = [row_of(entry, columns) for entry in entries if entry.record.work is not None]
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
            "height": bars_height(rows),
            "transform": [
                {"calculate": "datum.backward_all - datum.recomputed", "as": "backward"},
                {"fold": kinds, "as": ["kind", "flops"]},
                {"calculate": f"indexof({kinds!r}, datum.kind)", "as": "order"},
            ],
            "mark": {"type": "bar"},
            "encoding": {
                "y": names_axis(rows),
                "x": {
                    "field": "flops",
                    "type": "quantitative",
                    "title": "FLOPs",
                    "stack": "zero",
                    "axis": {"format": "~s"},
                },
                **_by_kind(kinds, tip("flops", "FLOPs", ",d")),
            },
        },
        rows=tuple(rows),
        paths=paths_of(columns),
    )


def _by_kind(kinds: Sequence[str], value: dict[str, Any]) -> dict[str, Any]:
    """Return the encodings of a stack: a colour a kind, in the order of `kinds`."""
    scale = {"domain": kinds, "range": [KIND_COLOURS[kind] for kind in kinds]}
    return {
        "color": {"field": "kind", "type": "nominal", "title": "kind", "scale": scale},
        "order": {"field": "order"},
        "tooltip": [tip("name", "trial"), tip("kind", "kind"), value],
    }
