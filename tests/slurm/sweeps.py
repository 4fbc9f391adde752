"""Sweeps of trivial points, each a command line in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records.store import RECORD
from tests.slurm.starts import VARIABLE, starts_of

ROOT = Path(__file__).parents[2]
TRIVIAL = (
    "model=python",
    "model.factory=tests.slurm.starts:counted",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=8",
    "protocol=smoke",
    "protocol.timed_pairs=0",
    "protocol.parity_steps=1",
    "tracker=none",
)
"""Points that cost little more than their launch."""

_TRACES = ".starts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep of trivial points as a user would start it.

    Fields:
        outputs_dir: where its folder is.
        name: of the sweep.
        overrides: of the command, besides those that make points trivial.
    """

    outputs_dir: Path
    name: str
    overrides: tuple[str, ...]

    @property
    def root(self) -> Path:
        """Its folder."""
        return self.outputs_dir / self.name

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Start the command, with `overrides` on top; what it says comes through `stderr`."""
        traces = self.root / _TRACES
        traces.mkdir(parents=True, exist_ok=True)
        words = [
            *TRIVIAL,
            *self.overrides,
            *overrides,
            f"name={self.name}",
            f"outputs_dir={self.outputs_dir}",
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "harness", "-m", *words],
            cwd=ROOT,
            env=os.environ | {VARIABLE: str(traces)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *overrides: str) -> str:
        """Run the command to its end and return what it says.

        Raises:
            RuntimeError: it did not exit with 0.
        """
        process = self.start(*overrides)
        _, said = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{self.name}: the sweep exited with {process.returncode}:\n{said}")
        return said

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the records on disk, by trial_id."""
        paths = self.root.glob(f"*/{RECORD}")
        return {path.parent.name: json.loads(path.read_text("utf-8")) for path in paths}

    def starts(self) -> Counter[str]:
        """Return how often each trial has started, by trial_id."""
        return starts_of(self.root / _TRACES)


def plan_line(said: str) -> str:
    """Return the line of a command that says what is to run."""
    return next(line for line in said.splitlines() if " to run, " in line)
