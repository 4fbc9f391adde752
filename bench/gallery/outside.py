"""Run every case of `tests.gallery.outside` in a process of its own, and compare its answer.

python -m bench.gallery --part outside                  # all cases; exits with 1 where an answer is wrong
python -m bench.gallery --part outside fused_loss …    # these cases
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from bench.output import parser, publish
from bench.table import Column, table_of
from tests.gallery import outside
from tests.gallery.outside._commands import NEEDS_SLURM

_DEADLINE_S = 600.0
_MARK = "answer: "
"""What begins the line in which the process of a case says its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What became of one case.

    Fields:
        case: name of its module.
        asked: first line of the module's docstring.
        before: the answer of the version that the case was found in.
        after: today's answer.
        right: the right one.
    """

    case: str
    asked: str
    before: str
    after: str
    right: str

    @property
    def verdict(self) -> str:
        """`right`, `WRONG`, or `not run` where this machine cannot ask."""
        if self.after == NEEDS_SLURM:
            return "not run"
        return "right" if self.after == self.right else "WRONG"


def case_names() -> list[str]:
    """Return the names of all cases, sorted."""
    return sorted(module.name for module in iter_modules(outside.__path__) if module.name[0] != "_")


def ask(case: str) -> Answer:
    """Run one case in a process of its own, in an empty folder, and return what it answered."""
    module = import_module(f"{outside.__name__}.{case}")
    root = str(Path(__file__).parents[2])
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from {outside.__name__}.{case} import answer; "
        f"print({_MARK!r} + answer(), flush=True)"
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                check=False,
            )
            after = _said(done)
        except subprocess.TimeoutExpired:
            after = f"no answer within {_DEADLINE_S:.0f} s"
    asked = (module.__doc__ or "").partition("\n")[0]
    return Answer(case=case, asked=asked, before=module.BEFORE, after=after, right=module.RIGHT)


def main(words: Sequence[str]) -> int:
    """Print the table of all cases; return 1 where an answer is wrong."""
    options = parser(__doc__, "outside", "gallery")
    options.add_argument("cases", nargs="*", help="names of cases; all by default")
    chosen = options.parse_args(words)
    answers = [ask(case) for case in chosen.cases or case_names()]
    columns: dict[str, Column] = {
        "case": "case",
        "before": "before",
        "after": "after",
        "verdict": "verdict",
    }
    counts = Counter(answer.verdict for answer in answers)
    caption = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    table = table_of(answers, columns, title="Cases from outside", caption=caption)
    publish(
        table,
        chosen.out,
        protocol={"processes": "one a case"},
        results=[asdict(answer) for answer in answers],
    )
    return int("WRONG" in counts)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    answers = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if answers:
        return answers[-1]
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    return f"exit {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2][:200]}"
