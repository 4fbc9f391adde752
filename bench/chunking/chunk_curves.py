"""Chunk curves: measured peak and time against the budget, one figure a model.

    python -m bench.chunking --part chunk_curves docs/results/chunking-*.json --out docs/results

reads what `bench.chunking` has written and draws `chunk_curve-<pass>-<model>.svg`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

_SIZE = {"width": 360, "height": 220}
_SERIES = "what"


def main(words: Sequence[str]) -> int:
    """Draw the figures and print their paths."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chunking --part chunk_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of bench.chunking")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="the folder of the figures")
    chosen = parser.parse_args(words)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for path in chosen.results:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = "training" if content["protocol"]["training"] else "forward"
        for model in dict.fromkeys(row["model"] for row in content["results"]):
            rows = [row for row in content["results"] if row["model"] == model]
            name = re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
            figure = chosen.out / f"chunk_curve-{kind}-{name}.svg"
            figure.write_text(
                vl_convert.vegalite_to_svg(chart(f"{model}, {kind}", rows), config={"aria": False}),
                encoding="utf-8",
            )
            sys.stdout.write(f"{figure}\n")
    return 0


def chart(title: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the Vega-Lite specification of one model's curve.

    Args:
        title: of the figure.
        rows: of `bench.chunking`, for one model.
    """
    x = {"field": "budget", "type": "quantitative", "title": "budget / activation peak as it is, %"}
    peaks = {"field": "value", "type": "quantitative", "title": "measured peak, %"}
    times = {"field": "value", "type": "quantitative", "title": "time / as it is", "scale": {"zero": False}}
    colour = {"field": _SERIES, "type": "nominal", "title": None, "legend": {"orient": "bottom"}}
    panels = [
        {"mark": {"type": "line", "point": True}, "encoding": {"x": x, "y": y, "color": colour}, **_SIZE}
        | {"data": {"values": values}}
        for y, values in ((peaks, _peaks(rows)), (times, _times(rows)))
    ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": title,
        "hconcat": panels,
        "resolve": {"scale": {"color": "independent"}},
    }


def _peaks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kept = [row for row in rows if row["measured_bytes"] is not None]
    measured = [_point(row, "measured", 100 * row["measured_bytes"] / row["unchunked_bytes"]) for row in kept]
    return [*measured, *(_point(row, "budget", 100 * row["fraction"]) for row in rows)]


def _times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = {"slowdown": "measured", "estimated_slowdown": "by the cost model"}
    return [
        _point(row, name, row[field])
        for field, name in names.items()
        for row in rows
        if row[field] is not None
    ]


def _point(row: Mapping[str, Any], series: str, value: float) -> dict[str, Any]:
    return {"budget": 100 * row["fraction"], _SERIES: series, "value": value}
