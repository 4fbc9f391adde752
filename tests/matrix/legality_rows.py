"""Cells of the legality matrix, for its page: how those of the named variants end.

python -m tests.matrix.legality_rows modules megatron tiles
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

from bench.output import parser, publish
from bench.table import table_of
from bench.trials import PRELOAD, records
from harness.ranks.agent import Agent, sigterm_exits
from tests.matrix.legality import BATCH, VARIANTS, cells, judgement, outcome, protocol, to_run, unexpected


def main() -> int:
    """Run the cells, print a table and all that is unexpected, write the JSON; 1 if there is such."""
    made = parser(__doc__, "legality_added")
    made.prog = "python -m tests.matrix.legality_rows"
    made.add_argument("variants", nargs="+", choices=(*VARIANTS, "tiles"), help="of ac; tiles is of chunk")
    arguments = made.parse_args()
    everything = cells()
    reasons = {cell: cell.refusal() for cell in everything}
    planned = to_run([cell for cell, reason in reasons.items() if reason is None])
    chosen = [cell for cell in planned if (cell.chunk or cell.variant) in arguments.variants]
    ran: dict[str, str] = {}
    seconds = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        for (mesh, compiler), group in groupby(chosen, lambda cell: (cell.mesh, cell.compile)):
            together, begun = list(group), time.perf_counter()
            for start in range(0, len(together), BATCH[compiler]):
                batch = together[start : start + BATCH[compiler]]
                found = records(agent, [cell.experiment() for cell in batch], Path(folder))
                ran |= {cell.words: outcome(record) for cell, record in zip(batch, found, strict=True)}
            seconds[compiler] += round(time.perf_counter() - begun)
            sys.stderr.write(f"{len(ran)} of {len(chosen)}: {mesh}, {compiler}\n")
    counts = Counter(((cell.chunk or cell.variant), judgement(cell, ran[cell.words])) for cell in chosen)
    table = table_of(
        sorted(counts),
        {
            "variant": lambda key: key[0],
            "judgement": lambda key: key[1],
            "cells": lambda key: str(counts[key]),
        },
        title="Cells that ran",
    )
    results = {
        "refused": dict(Counter(reason for reason in reasons.values() if reason is not None)),
        "ran": ran,
        "seconds": dict(seconds),
        "legal": sum(reason is None for reason in reasons.values()),
        "planned": len(planned),
    }
    publish(table, arguments.out, protocol=protocol(), results=results)
    problems = unexpected(ran, {cell.words: cell for cell in chosen})
    for words, problem in problems.items():
        sys.stderr.write(f"UNEXPECTED {words}: {problem}\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
