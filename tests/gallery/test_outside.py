"""Each case that outsiders brought has the right answer today, asked in a process and a folder of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from tests.gallery import outside
from tests.gallery.outside._commands import NEEDS_SLURM

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
MARK = "answer: "
"""What begins the line in which the process of a case says its answer."""
CASES = sorted(module.name for module in iter_modules(outside.__path__) if module.name[0] != "_")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_right(case: str, tmp_path: Path) -> None:
    module = import_module(f"{outside.__name__}.{case}")
    answer = ask(case, tmp_path)
    if answer == NEEDS_SLURM:
        pytest.skip(NEEDS_SLURM)
    assert answer == module.RIGHT, module.__doc__
    assert module.BEFORE != module.RIGHT


def ask(case: str, folder: Path) -> str:
    """Return what a case answers."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {outside.__name__}.{case} import answer; "
        f"print({MARK!r} + answer(), flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if answers:
        return answers[-1]
    if done.returncode < 0:
        return f"ended by {signal.Signals(-done.returncode).name}"
    return f"exit {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2][:200]}"
