"""Every variant under each schedule of a pipeline (`--part pipelines`), or on each mesh of `docs/meshes.md`.

Each cell is refused with its reason, or runs as `acbench` runs it: beside its twin, with dropout, and
against one process that is not cut. What is kept are verdicts and integers, which repeat: forwards of a
block, FLOPs of the backward over the twin's and the activation peak of each rank; or collectives by axis.

    python -m tests.matrix.pipeline_rows [--part meshes] [--only zero_bubble]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.output import keep, parser, publish
from bench.table import Column, table_of
from bench.trials import PRELOAD, records
from harness.ranks.agent import Agent
from tests.matrix import mesh_cells, steps_in_parts
from tests.matrix.steps_in_parts import Cell, judgement

PARTS = {"pipelines": steps_in_parts.cells, "meshes": mesh_cells.cells}


def main(words: Sequence[str]) -> int:
    """Run all cells, print the table, write the JSON; 1 where one ends otherwise than is known."""
    arguments = parser(__doc__, "pipelines")
    arguments.prog = "python -m tests.matrix.pipeline_rows"
    arguments.add_argument("--part", choices=PARTS, default="pipelines", help="which cells")
    arguments.add_argument("--only", default="", help="cells whose words have this")
    arguments.set_defaults(out=None)
    chosen = arguments.parse_args(words)
    out = chosen.out or Path("outputs/bench", f"{chosen.part}.json")
    found = [cell for cell in PARTS[chosen.part]() if chosen.only in cell.words]
    rows: list[dict[str, Any]] = []
    with Agent(preload=PRELOAD) as agent, TemporaryDirectory() as folder:
        for _, group in groupby(found, key=lambda cell: cell.place):
            rows += rows_of(agent, list(group), Path(folder))
            keep(out, protocol={"cells": len(found)}, results=rows)
            sys.stderr.write(f"{len(rows)} of {len(found)} cells\n")
    judged = [judgement(cell, row["ending"]) for cell, row in zip(found, rows, strict=True)]
    shown = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "words"]
    columns: dict[str, Column] = {name: partial(_shown, name=name) for name in ("words", "judgement", *shown)}
    texts = [{**row, "judgement": each} for row, each in zip(rows, judged, strict=True)]
    caption = mesh_cells.counts_of(found, [row["ending"] for row in rows])
    publish(table_of(texts, columns, caption=caption), out, protocol={"cells": len(found)}, results=rows)
    return int("unexpected" in judged)


def _shown(row: dict[str, Any], name: str) -> str:
    return str(row.get(name, "")).translate(str.maketrans("", "", "{}'"))


def rows_of(agent: Agent, chosen: Sequence[Cell], folder: Path) -> list[dict[str, Any]]:
    """Return what is kept of cells of one mesh, in their order.

    Args:
        agent: preloaded with `PRELOAD`.
        chosen: the cells.
        folder: of the ranks' logs.
    """
    legal = [cell for cell in chosen if cell.refusal() is None]
    ran = records(agent, [cell.experiment for cell in legal], folder) if legal else []
    found = {cell.words: record for cell, record in zip(legal, ran, strict=True)}
    return [cell.row(found.get(cell.words)) for cell in chosen]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
