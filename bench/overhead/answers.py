"""How soon the commands answer where nothing has to be computed: help, a refusal, a finished sweep, a report.

Each is a process of its own. A first sweep leaves the records that the finished sweep and the report read.

    python -m bench.overhead --part answers --repeats 5
    python -m bench.overhead --part answers --before ../other_checkout
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from bench.output import parser, publish

TARGET_S = 1.2
"""Wall time that an answer may take on a machine with nothing else to do."""

_REPORT = "import sys; from harness.report.main import main; sys.exit(main())"
_PROGRAMS = {"acbench": ("-m", "harness"), "acbench-report": ("-c", _REPORT)}
_SIZES = ("model.n_layers=2", "model.width=16", "model.hidden_width=32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Seconds of repeated answers of one checkout; equal indices were taken side by side.

    Fields:
        wall_s: wall time of each repeat, by what was asked.
        cpu_s: processor time, user and system, which other load on the machine disturbs less.
    """

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    made = parser(__doc__, "answers", "overhead")
    made.add_argument("--before", type=Path, help="another checkout")
    made.add_argument("--repeats", type=int, default=5, help="answers to each question")
    options = made.parse_args(words)
    checkouts = {"after": Path(__file__).parents[2]}
    if options.before is not None:
        checkouts = {"before": options.before.resolve(), **checkouts}
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = _measured(checkouts, Path(folder), options.repeats)
    publish(
        _table(found),
        options.out,
        protocol={"repeats": options.repeats, "order": "interleaved", "load_average": load_average},
        results={name: {"wall_s": answers.wall_s, "cpu_s": answers.cpu_s} for name, answers in found.items()},
    )
    return 0


def _measured(checkouts: Mapping[str, Path], folder: Path, repeats: int) -> dict[str, Answers]:
    questions = {name: _questions(folder / name) for name in checkouts}
    for name, checkout in checkouts.items():
        _answer(checkout, questions[name]["finished sweep"])  # the first time it runs its trials
    found = {name: Answers(wall_s={}, cpu_s={}) for name in checkouts}
    for _ in range(repeats):
        for question in questions["after"]:
            for name, checkout in checkouts.items():
                wall_s, cpu_s = _answer(checkout, questions[name][question])
                found[name].wall_s.setdefault(question, []).append(wall_s)
                found[name].cpu_s.setdefault(question, []).append(cpu_s)
    return found


def _questions(outputs: Path) -> dict[str, Sequence[str]]:
    """Return the commands, by what they ask for."""
    sweep = ("model=mlp", "ac=glob(*)", "mesh=single", "protocol=parity", "tracker=none", *_SIZES)
    return {
        "help": ("acbench", "--help"),
        "refusal": ("acbench", "model=mlp", "ac=selective_layer", "ac.ac_freq=0"),
        "finished sweep": ("acbench", "-m", *sweep, f"outputs_dir={outputs}"),
        "report": ("acbench-report", str(outputs / "default")),
    }


def _answer(checkout: Path, command: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of wall and of processor time that one command takes."""
    name, *arguments = command
    before, start_s = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, *_PROGRAMS[name], *arguments],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": ""},  # as an installed one
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    wall_s, after = time.perf_counter() - start_s, os.times()
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    return wall_s, cpu_s


def _table(found: Mapping[str, Answers]) -> Table:
    table = Table(title=f"Seconds to an answer: medians of wall and processor time; target {TARGET_S} s")
    table.add_column("question")
    for name in found:
        table.add_column(f"{name}, wall", justify="right")
        table.add_column(f"{name}, CPU", justify="right")
    for question in found["after"].wall_s:
        cells = [
            f"{median(times[question]):.2f}"
            for answers in found.values()
            for times in (answers.wall_s, answers.cpu_s)
        ]
        table.add_row(question, *cells)
    return table
