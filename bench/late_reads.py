"""What `assert_neutral` says of setups whose late reads are known: verdicts, culprits, false alarms, misses.

The setups are those of `tests.gallery.users.outsider`. Of the right ones it is known what their recomputation
reads beside its inputs: a name more is a false alarm, and one less is a miss. Of the wrong ones it is known
where the fault lies.

python -m bench.late_reads --only ema
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from bench.output import parser, publish
from bench.table import table_of
from harness.check import NotNeutral, assert_neutral
from harness.check.not_neutral import Neutrality
from tests.gallery.users.outsider import right, wrong
from tests.gallery.users.outsider.setups import Setup, rows

SETUPS: tuple[Setup, ...] = (*right.SETUPS, *wrong.SETUPS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the check says of one setup.

    Fields:
        name: of the setup.
        expected, verdict: the right verdict, and the check's.
        alarms: late reads that are none.
        misses: patterns of late reads that the check does not list.
        is_named: the message says where the fault lies; true where there is none.
        message: all that the check says.
        seconds: wall time of the check.
    """

    name: str
    expected: str
    verdict: str
    alarms: tuple[str, ...]
    misses: tuple[str, ...]
    is_named: bool
    message: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether verdict, culprit and late reads are those that were written down."""
        return self.verdict == self.expected and self.is_named and not self.alarms and not self.misses


def main() -> int:
    """Judge the setups, print the table, write the JSON; 1 where anything is not as written down."""
    made = parser(__doc__, "late_reads")
    made.add_argument("--only", default="", help="only setups with this in the name")
    arguments = made.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    judged = [judge(setup) for setup in SETUPS if arguments.only in setup.name]
    publish(table(judged), arguments.out, protocol={"steps": 3}, results=[asdict(each) for each in judged])
    return int(not all(each.is_right for each in judged))


def judge(setup: Setup) -> Judged:
    """Return what `assert_neutral` says of a setup."""
    started = time.perf_counter()
    found = _found(setup)
    return Judged(
        name=setup.name,
        expected=setup.verdict,
        verdict=found.verdict,
        alarms=tuple(each for each in found.late_reads if not _any(setup.reads + setup.tolerated, each)),
        misses=_missed(setup, found),
        is_named=bool(re.search(setup.culprit, str(found))),
        message=str(found),
        seconds=round(time.perf_counter() - started, 3),
    )


def _found(setup: Setup) -> Neutrality:
    try:
        return assert_neutral(setup.make, rows(), setup.variant)
    except NotNeutral as failure:
        return failure.found


def _any(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _missed(setup: Setup, found: Neutrality) -> tuple[str, ...]:
    return tuple(
        pattern for pattern in setup.reads if not any(re.search(pattern, name) for name in found.late_reads)
    )


def table(judged: list[Judged]) -> Table:
    """Return a row a setup, and the counts in the title."""
    right_ones = [each for each in judged if each.expected == "neutral"]
    wrong_ones = [each for each in judged if each.expected != "neutral"]
    counts = (
        f"{sum(each.verdict == each.expected for each in judged)} of {len(judged)} verdicts right",
        f"{sum(each.verdict == 'differs' for each in right_ones)} of {len(right_ones)} falsely accused",
        f"{sum(bool(each.alarms) for each in right_ones)} by late reads",
        f"late reads missed in {sum(bool(each.misses) for each in right_ones)}",
        f"{sum(each.verdict == 'neutral' for each in wrong_ones)} silent misses in {len(wrong_ones)}",
        f"culprit named in {sum(each.is_named for each in wrong_ones)}",
    )
    return table_of(
        judged,
        {
            "setup": "name",
            "verdict": "verdict",
            "false late reads": lambda each: ", ".join(each.alarms),
            "missed": lambda each: ", ".join(each.misses),
            "culprit": lambda each: "named" if each.is_named else "unnamed",
            "s": "seconds:.1f",
            "": lambda each: "right" if each.is_right else "WRONG",
        },
        title="; ".join(counts),
    )


if __name__ == "__main__":
    sys.exit(main())
