"""The legality matrix: where each AC variant may stand, and whether it is neutral there.

Every cell is refused, neutral, or known to be wrong by a rule that names an entry of the gallery. One that is
something else is unexpected, and so is one that a rule calls wrong and that is right: both are printed, and
the exit status is 1. Cells that are in the file of results, made by the same sources, do not run again.

    python -m bench.legality --minutes 3
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.legality_cells import (
    COMPILED_STRENGTH,
    DROPOUTS,
    DTYPES,
    MESHES,
    OPTIONS,
    SIZES,
    VARIANTS,
    Cell,
    cells,
    known_bad,
    to_run,
)
from bench.output import keep, parser, publish
from bench.table import Column, table_of
from bench.trials import PRELOAD, records
from harness.experiment.compilers import COMPILERS, ORDERS
from harness.experiment.experiment import WRAP_ORDERS
from harness.measure.environment import environment_id, identity
from harness.ranks.agent import Agent, sigterm_exits
from harness.records.record import Record

JUDGEMENTS = ("neutral", "known bad", "refused", "unexpected")
_BATCH = {"none": 24, "aot_eager": 4, "inductor": 2}
"""Cells that run one after the other in one set of ranks, by compiler."""
_COST_S = {"none": 1.0, "aot_eager": 12.0, "inductor": 40.0}
"""Seconds of a cell on two cores, where none has been measured."""


@dataclass(kw_only=True, slots=True)
class Results:
    """What has been found out so far, as it stands in the file.

    Fields:
        environment_id: of the environment in which the cells ran; those of another one run again.
        refused: number of cells by the reason for which they are refused before anything runs.
        ran: how each cell that ran ended, by its words.
        seconds: wall time of the cells that ran, by compiler.
        legal: number of cells that are not refused before anything runs.
        planned: number of those that are to run.
    """

    environment_id: str
    refused: dict[str, int] = field(default_factory=dict)
    ran: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    legal: int = 0
    planned: int = 0


def main() -> int:
    """Run what is missing, print the table and all that is unexpected, write the JSON; 1 if there is such."""
    arguments = _arguments()
    everything = cells()
    reasons = {cell: cell.refusal() for cell in everything}
    legal = [cell for cell in everything if reasons[cell] is None]
    chosen = to_run(legal)
    results = _earlier(arguments.out)
    results.refused = dict(Counter(reason for reason in reasons.values() if reason is not None))
    results.legal, results.planned = len(legal), len(chosen)
    _run(chosen, results, arguments)
    by_words = {cell.words: cell for cell in everything}
    publish(_table(results, by_words), arguments.out, protocol=protocol(), results=_as_json(results))
    print(told(results))
    problems = unexpected(results.ran, by_words)
    for words, problem in problems.items():
        print(f"UNEXPECTED {words}: {problem}")
    return int(bool(problems))


def judgement(cell: Cell, outcome: str) -> str:
    """Return which of `JUDGEMENTS` a cell gets that ended with `outcome`."""
    rule = known_bad(cell)
    kind, _, part = outcome.partition(": ")
    if kind == "refused":
        return "refused"
    if rule is not None:
        return "known bad" if kind == "differs" and part in rule.parts else "unexpected"
    return "neutral" if kind == "neutral" else "unexpected"


def outcome(record: Record) -> str:
    """Return how a cell ended: its verdict and what differs first, or why it did not end well."""
    if record.error is not None:
        return f"{record.status}: {record.error.message}"
    first = None if record.parity is None else record.parity.first
    if record.verdict == "differs" and first is not None:
        return f"differs: {first.part}"
    if record.verdict == "neutral":
        return "neutral"
    return f"{record.verdict}: {record.reason}"


def unexpected(ran: Mapping[str, str], by_words: Mapping[str, Cell]) -> dict[str, str]:
    """Return what is wrong with each cell whose end is not the one that is known, by its words."""
    found = {}
    for words, ending in ran.items():
        rule = known_bad(by_words[words])
        if judgement(by_words[words], ending) == "unexpected":
            expected = "" if rule is None else f"; gallery {rule.number} says that it differs: {rule.name}"
            found[words] = f"{ending}{expected}"
    return found


def protocol() -> dict[str, Any]:
    """Return how cells are made and which of them run."""
    return {
        "overrides": SIZES,
        "options": OPTIONS,
        "variants": VARIANTS,
        "meshes": MESHES,
        "wrap_orders": WRAP_ORDERS,
        "compilers": COMPILERS,
        "compile_orders": ORDERS,
        "dtypes": DTYPES,
        "dropouts": DROPOUTS,
        "uncompiled": "every cell",
        "compiled": f"rows that hold every combination of {COMPILED_STRENGTH} values",
    }


def told(results: Results) -> str:
    """Return how many cells there are, and what the rest will take."""
    left = results.planned - len(results.ran)
    refused = sum(results.refused.values())
    said = (
        f"{refused + results.legal:,} cells: {refused:,} refused before anything runs, {results.legal:,} "
        f"legal; of these {results.planned:,} are to run, {len(results.ran):,} have"
    )
    return said if left == 0 else f"{said}; the same command continues"


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "legality")
    made.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    made.add_argument(
        "--meshes", nargs="+", choices=MESHES, default=MESHES, help="leave the others for later"
    )
    made.add_argument("--compilers", nargs="+", choices=COMPILERS, default=COMPILERS, help="the same")
    return made.parse_args()


def _earlier(path: Path) -> Results:
    """Return what the file says of the environment that this is."""
    here = environment_id(identity("cpu"))
    if path.exists():
        found = Results(**json.loads(path.read_text("utf-8"))["results"])
        if found.environment_id == here:
            return found
        print(f"{path}: of other sources or packages; all cells run again")
    return Results(environment_id=here)


def _run(chosen: Sequence[Cell], results: Results, arguments: argparse.Namespace) -> None:
    """Run the cells that have not run, and keep each batch as soon as it has ended."""
    started = time.perf_counter()
    now = [cell for cell in chosen if cell.mesh in arguments.meshes and cell.compile in arguments.compilers]
    left = [cell for cell in now if cell.words not in results.ran]
    print(f"{told(results)}; about {_estimate_s(left, results) / 60:.0f} min to go", flush=True)
    with tempfile.TemporaryDirectory() as folder, sigterm_exits(), Agent(preload=PRELOAD) as agent:
        for batch in _batches(left):
            if time.perf_counter() - started > 60 * arguments.minutes:
                return
            begun = time.perf_counter()
            found = records(agent, [cell.experiment() for cell in batch], Path(folder))
            results.ran |= {cell.words: outcome(record) for cell, record in zip(batch, found, strict=True)}
            taken, compiler = time.perf_counter() - begun, batch[0].compile
            results.seconds[compiler] = round(results.seconds.get(compiler, 0.0) + taken, 1)
            keep(arguments.out, protocol=protocol(), results=_as_json(results))
            print(
                f"{len(results.ran)} of {results.planned}: {compiler} {batch[0].mesh}, {taken:.1f} s",
                flush=True,
            )


def _batches(left: Iterable[Cell]) -> Iterator[list[Cell]]:
    for (_, compiler), group in groupby(left, lambda cell: (cell.mesh, cell.compile)):
        together, size = list(group), _BATCH[compiler]
        yield from (together[start : start + size] for start in range(0, len(together), size))


def _estimate_s(left: Sequence[Cell], results: Results) -> float:
    done = Counter(words.partition(" compile=")[2].split()[0] for words in results.ran)
    cost = {
        compiler: results.seconds[compiler] / done[compiler] if done[compiler] else usual
        for compiler, usual in _COST_S.items()
    }
    return sum(cost[cell.compile] for cell in left)


def _table(results: Results, by_words: Mapping[str, Cell]) -> Table:
    found = Counter(
        (cell.variant, cell.compile, judgement(cell, ending))
        for cell, ending in ((by_words[words], ending) for words, ending in results.ran.items())
    )

    def counted(compiler: str, judged: str) -> Column:
        return lambda variant: str(found[variant, compiler, judged])

    columns: dict[str, Column] = {"variant": str} | {
        f"{compiler}: {judged}": counted(compiler, judged)
        for compiler in COMPILERS
        for judged in JUDGEMENTS
        if any(found[variant, compiler, judged] for variant in VARIANTS)
    }
    return table_of(VARIANTS, columns, title="Cells that ran, by compiler and judgement")


def _as_json(results: Results) -> dict[str, Any]:
    return {name: getattr(results, name) for name in Results.__slots__}


if __name__ == "__main__":
    sys.exit(main())
