"""How soon the commands answer where nothing has to be computed: help, a refusal, a finished sweep, a report.

Each is a process of its own. A first sweep leaves the records that the finished sweep and the report read.

    python -m bench.overhead --repeats 5
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.output import parser, publish
from bench.table import Column, table_of

TARGET_S = 1.2
"""Wall time that an answer may take on a machine with nothing else to do."""

_ROOT = Path(__file__).parents[2]
_REPORT = "import sys; from harness.report.main import main; sys.exit(main())"
_PROGRAMS = {"acbench": ("-m", "harness"), "acbench-report": ("-c", _REPORT)}
_SIZES = ("model.n_layers=2", "model.width=16", "model.hidden_width=32")


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    made = parser(__doc__, "answers", "overhead")
    made.add_argument("--repeats", type=int, default=5, help="answers to each question")
    options = made.parse_args(words)
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        questions = _questions(Path(folder))
        _answer(questions["finished sweep"])  # the first time it runs its trials
        taken = [
            {question: _answer(command) for question, command in questions.items()}
            for _ in range(options.repeats)
        ]
    found = {
        unit: {question: [each[question][index] for each in taken] for question in questions}
        for index, unit in enumerate(("wall_s", "cpu_s"))
    }
    columns: dict[str, Column] = {
        "question": str,
        "wall": lambda question: f"{median(found['wall_s'][question]):.2f}",
        "CPU": lambda question: f"{median(found['cpu_s'][question]):.2f}",
    }
    publish(
        table_of(
            questions, columns, title=f"Seconds to an answer: medians; target {TARGET_S} s of wall time"
        ),
        options.out,
        protocol={"repeats": options.repeats, "order": "interleaved", "load_average": load_average},
        results=found,
    )
    return 0


def _questions(outputs: Path) -> dict[str, Sequence[str]]:
    """Return the commands, by what they ask for."""
    sweep = ("model=mlp", "ac=glob(*)", "mesh=single", "protocol=parity", "tracker=none", *_SIZES)
    return {
        "help": ("acbench", "--help"),
        "refusal": ("acbench", "model=mlp", "ac=selective_layer", "ac.ac_freq=0"),
        "finished sweep": ("acbench", "-m", *sweep, f"outputs_dir={outputs}"),
        "report": ("acbench-report", str(outputs / "default")),
    }


def _answer(command: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of wall and of processor time that one command takes."""
    name, *arguments = command
    before, start_s = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, *_PROGRAMS[name], *arguments],
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": ""},  # as an installed one
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    wall_s, after = time.perf_counter() - start_s, os.times()
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    return wall_s, cpu_s
