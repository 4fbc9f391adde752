"""Entries of the gallery, judged by `assert_neutral`: silent defects of checkpointing, and their controls.

python -m tests.gallery.judge --only n13 c29
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.table import table_of
from tests.gallery.checking import checked
from tests.gallery.entries import CONTROLS, DEFECTS, Entry, load

STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the check says of one entry.

    Fields:
        name: module of the entry.
        title: its first line.
        expected: the right verdict.
        verdict: the check's, or `not run`.
        part: what differs first, None where nothing does.
        culprit: its name.
        probe: what found it.
        causes: numbers of the entries that the message names; the entry itself should be among them.
        message: all that the check says.
        seconds: wall time of the check, in seconds.
        is_right: the verdict is the expected one.
        is_explained: its number is among `causes`; true for controls.
        is_named: the message has a word of the entry's `names`; true for controls.
    """

    name: str
    title: str
    expected: str
    verdict: str
    part: str | None
    culprit: str | None
    probe: str | None
    causes: tuple[int, ...]
    message: str
    seconds: float
    is_right: bool
    is_explained: bool
    is_named: bool


def main() -> int:
    """Judge all entries, print the table, write the JSON; 1 if a verdict is wrong."""
    arguments = _arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = tuple(arguments.only or ("n", "c"))
    rows = list(judged([name for name in (*DEFECTS, *CONTROLS) if name.startswith(wanted)]))
    results = [asdict(row) for row in rows]
    publish(_table(rows), arguments.out, protocol={"steps": STEPS}, results=results)
    return int(not all(row.is_right for row in rows))


def judged(names: list[str], *, steps: int = STEPS) -> Iterator[Judged]:
    """Yield what the check says of each entry after so many optimizer steps."""
    for name in names:
        entry = load(name)
        lacking = entry if isinstance(entry, str) else entry.needed
        if isinstance(entry, str) or lacking:
            yield _not_run(name, lacking)
        else:
            gc.collect()
            gc.freeze()  # what is imported is no garbage, and a check collects what is
            yield judge(entry, steps)


def judge(entry: Entry, steps: int) -> Judged:
    """Return what `assert_neutral` says of an entry."""
    case, started = entry.case, time.perf_counter()
    found = checked(case, steps=steps)
    message, first, causes = str(found), dict(found.first or {}), _numbers(found.cause)
    return Judged(
        name=entry.name,
        title=entry.title,
        expected=case.verdict,
        verdict=found.verdict,
        part=first.get("part"),
        culprit=first.get("name"),
        probe=first.get("probe"),
        causes=causes,
        message=message,
        seconds=round(time.perf_counter() - started, 3),
        is_right=found.verdict == case.verdict,
        is_explained=case.verdict == "neutral" or entry.number in causes,
        is_named=not case.names or any(re.search(word, message) for word in case.names),
    )


def _numbers(cause: str) -> tuple[int, ...]:
    """Return the numbers in `looks like gallery 3 or 9: …`."""
    begin = cause.partition(":")[0] if cause.startswith("looks like gallery") else ""
    return tuple(int(word) for word in begin.split() if word.isdigit())


def _not_run(name: str, lacking: str) -> Judged:
    return Judged(
        name=name, title="", expected="", verdict="not run", part=None, culprit=None, probe=None, causes=(),
        message=f"needs {lacking}", seconds=0.0, is_right=True, is_explained=True, is_named=True,
    )  # fmt: skip


def _arguments() -> argparse.Namespace:
    made = parser(__doc__, "gallery")
    made.prog = "python -m tests.gallery.judge"
    made.add_argument("--only", nargs="+", help="how names of modules start")
    return made.parse_args()


def _table(rows: list[Judged]) -> Table:
    defects, controls = ([row for row in rows if row.name.startswith(kind)] for kind in "nc")
    right = [sum(row.is_right and row.verdict != "not run" for row in kind) for kind in (defects, controls)]
    explained = sum(row.is_explained and row.is_right for row in defects)
    named = sum(row.is_named and row.is_right for row in defects)
    return table_of(
        rows,
        {
            "entry": "name",
            "verdict": "verdict",
            "expected": "expected",
            "part": "part",
            "culprit": "culprit",
            "probe": "probe",
            "looks like": lambda row: " ".join(map(str, row.causes)),
            "": lambda row: ("right" if row.is_named else "right, unnamed") if row.is_right else "WRONG",
        },
        title=f"torch {torch.__version__}: {right[0]} of {len(defects)} defects found, {named} of them with "
        f"the culprit named, {explained} with their number; {right[1]} of {len(controls)} controls passed",
    )


if __name__ == "__main__":
    sys.exit(main())
