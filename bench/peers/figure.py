"""The figure of the peers: extra FLOPs and step time against the measured peak, one row of panels a workload.

    python -m bench.peers --part figure docs/results/peers_*-cpu-*.json --out docs/results/peers.svg

reads what `bench.peers` has written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.output import parser
from harness.report.formats.vega import to_svg

_CONFIG = {"aria": False, "axis": {"grid": False, "tickCount": 5}}
_SIZE = {"width": 380, "height": 210}
_OURS = "ac=budget"
_BOUND = "bound"
_LINES = {"exact": _OURS, "bound": _BOUND, "greedy": "greedy", "uniform": "one decision for all blocks"}
_PEAK = {
    "field": "peak",
    "type": "quantitative",
    "title": "peak / peak without activation checkpointing, %",
    "scale": {"zero": False},
}


def main(words: Sequence[str]) -> int:
    """Draw the figure and print its path."""
    made = parser(__doc__, "figure", "peers")
    made.set_defaults(out=Path("outputs/bench/peers.svg"))
    made.add_argument("results", nargs="+", type=Path, help="JSON files of bench.peers")
    chosen = made.parse_args(words)
    found = [json.loads(path.read_text(encoding="utf-8"))["results"] for path in chosen.results]
    rows = [row for each in found for row in each["peers"]]
    ablations = [row for each in found for row in each["ablations"]]
    chosen.out.write_text(to_svg(chart(rows, ablations), _CONFIG), encoding="utf-8")
    sys.stdout.write(f"{chosen.out}\n")
    return 0


def chart(rows: Sequence[Mapping[str, Any]], ablations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the Vega-Lite specification.

    Args:
        rows: of peers, as `bench.peers` writes them.
        ablations: of budgets, likewise.
    """
    names = dict.fromkeys(row["workload"] for row in rows)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "vconcat": [
            {
                "hconcat": [
                    _panel(
                        f"{name}: extra FLOPs, % of a step",
                        [
                            {"peak": _peak(row), "who": row["peer"], "value": row["extra"]}
                            for row in _ran(rows, name)
                        ],
                        list(_curves(ablations, name)),
                    ),
                    _panel(f"{name}: step time / plain step", list(_times(rows, name)), []),
                ]
            }
            for name in names
        ],
    }


def _panel(title: str, points: list[dict[str, Any]], lines: list[dict[str, Any]]) -> dict[str, Any]:
    y = {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": False}}
    shown: dict[str, Any] = {"x": _PEAK, "y": y}
    who = {"field": "who", "type": "nominal", "title": None}
    point = {"mark": {"type": "point", "size": 45}, "data": {"values": points}}
    line = {"mark": {"type": "line"}, "data": {"values": lines}}
    layers = [{**point, "encoding": {**shown, "color": who, "shape": who}}]
    if lines:
        layers.append({**line, "encoding": {**shown, "strokeDash": who}})
    return {"title": title, "layer": layers, **_SIZE}


def _times(rows: Sequence[Mapping[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """Yield the times of peers, and ours at their peaks; compiled peers have none."""
    for row in _ran(rows, name):
        if row["time"] is not None:
            yield {"peak": _peak(row), "who": row["peer"], "value": row["time"]["median"]}
        if row["ours_time"] is not None:
            yield {"peak": _peak(row), "who": _OURS, "value": row["ours_time"]["median"]}


def _curves(ablations: Sequence[Mapping[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    for row in ablations:
        for field, who in _LINES.items():
            if row["workload"] == name and row[field] is not None:
                yield {"peak": 100 * row["share"], "who": who, "value": row[field]}


def _ran(rows: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["workload"] == name and row["peak_bytes"] is not None]


def _peak(row: Mapping[str, Any]) -> float:
    return 100 * float(row["peak_bytes"]) / float(row["plain_bytes"])
