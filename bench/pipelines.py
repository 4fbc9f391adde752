"""Pipelines: every variant under each schedule.

Each cell is refused with its reason, or runs as `acbench` runs it: beside its twin, with dropout, and against
one process that is not cut. What is kept are verdicts, forwards of a block, FLOPs of the
backward over the twin's, and the activation peak of each rank: integers and verdicts, which repeat.

    python -m bench.pipelines [--only zero_bubble]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.output import keep, parser, publish
from bench.table import table_of
from bench.trials import PRELOAD, records
from harness.ranks.agent import Agent
from tests.matrix.steps_in_parts import Cell, cells, judgement, row_of


def main(words: Sequence[str]) -> int:
    """Run all cells, print the table, write the JSON; 1 where one ends otherwise than is known."""
    arguments = parser(__doc__, "pipelines")
    arguments.add_argument("--only", default="", help="cells whose words have this")
    chosen = arguments.parse_args(words)
    found = [cell for cell in cells() if chosen.only in cell.words]
    rows: list[dict[str, Any]] = []
    with Agent(preload=PRELOAD) as agent, TemporaryDirectory() as folder:
        for _, group in groupby(found, key=lambda cell: cell.place):
            rows += rows_of(agent, list(group), Path(folder))
            keep(chosen.out, protocol={"cells": len(found)}, results=rows)
            sys.stderr.write(f"{len(rows)} of {len(found)} cells\n")
    by_words = {cell.words: cell for cell in found}
    judged = [judgement(by_words[row["words"]], row["ending"]) for row in rows]
    shown = table_of(
        [{**row, "judgement": each} for row, each in zip(rows, judged, strict=True)],
        {
            "cell": lambda row: row["words"],
            "judgement": lambda row: row["judgement"],
            "forwards": lambda row: " ".join(
                "+".join(f"{n:g}" for n in rank) for rank in row.get("forwards", ())
            ),
            "FLOPs / twin": lambda row: str(row.get("flops", "")),
            "activation peaks": lambda row: " ".join(f"{n:,}" for n in row.get("peaks", ())),
            "ending": lambda row: row["ending"][:60],
        },
    )
    publish(shown, chosen.out, protocol={"cells": len(found)}, results=rows)
    return int("unexpected" in judged)


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
    return [row_of(cell, found.get(cell.words)) for cell in chosen]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
