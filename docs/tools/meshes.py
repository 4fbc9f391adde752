"""The table of collectives on each mesh, of kept results of `tests.matrix.pipeline_rows --part meshes`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.tools.keep import KEPT
from docs.tools.pipelines import judged, link, numbered
from tests.matrix.mesh_cells import PLACES, VARIANTS, MeshCell, cells, counts_of


def kept() -> tuple[Path, dict[MeshCell, Mapping[str, Any]]]:
    """Return the file, and what it says of each cell."""
    (path,) = KEPT.glob("meshes-cpu-*.json")
    rows = {row["words"]: row for row in json.loads(path.read_text("utf-8"))["results"]}
    return path, {cell: rows[cell.words] for cell in cells()}


def repeats_table() -> str:
    """Return the collectives of each variant on each mesh, those of weights left out, and the refusals."""
    path, rows = kept()
    reasons: dict[str, None] = {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for variant in VARIANTS:
        found = [MeshCell(variant=variant, place=place) for place in PLACES]
        texts = tuple(_counts(cell, rows[cell], reasons) for cell in found)
        alike.setdefault(texts, []).append(f"`{variant.removeprefix('ac=')}`")
    lines = [
        "| `ac` | " + " | ".join(f"`{_short(place)}`" for place in PLACES) + " |",
        "| --- " * (1 + len(PLACES)) + "|",
        *(f"| {', '.join(names)} | {' | '.join(texts)} |" for texts, names in alike.items()),
    ]
    ended = counts_of(list(rows), [row["ending"] for row in rows.values()])
    return "\n".join([*lines, "", *numbered(reasons), "", f"{ended}. Measured: {link(path)}."])


def _counts(cell: MeshCell, row: Mapping[str, Any], reasons: dict[str, None]) -> str:
    """Return a cell of the table; a refusal has the number of its reason, which is added."""
    word = judged(cell, row, reasons)
    if word != "neutral":
        return word
    forward, backward, _, repeated = row[cell.axis]
    return f"{forward} + {backward}, {repeated}"


def _short(place: str) -> str:
    return place.removeprefix("mesh=").replace("mesh.cp_method=", "").replace("mesh.", "")
