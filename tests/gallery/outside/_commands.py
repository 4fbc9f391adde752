"""Commands of acbench as a stranger types them, in the empty folder that a case runs in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]

ENVIRONMENT = os.environ | {"PYTHONPATH": str(_ROOT)}
"""Environment in which commands find this checkout."""

PROGRAM = (sys.executable, "-m", "harness")
"""Words that start `acbench`."""

MODEL = """import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def make():
    return Net(), (torch.randn(8, 8),), lambda output: output.square().mean()
"""
"""A file of a user: `make` returns a model of two blocks, its input and its loss."""

NEEDS_SLURM = "needs Slurm"
"""Answer of a case that cannot run here; it counts neither as right nor as wrong."""


@contextmanager
def private_slurm() -> Iterator[dict[str, str]]:
    """Start a Slurm of one node for this user alone; yield the environment in which commands find it."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        environment = {"CLUSTER_DIR": folder, "CLUSTER_NODES": "1"}
        cluster = str(_ROOT / "slurm" / "cluster.sh")
        subprocess.run([cluster, "start"], env=os.environ | environment, check=True, capture_output=True)
        try:
            yield {"SLURM_CONF": str(Path(folder, "etc", "slurm.conf"))}
        finally:
            subprocess.run([cluster, "stop"], env=os.environ | environment, check=False, capture_output=True)


def acbench(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `acbench` with `words`."""
    return _run("-m", "harness", *words)


def acbench_plan(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `acbench-plan` with `words`."""
    return _run("-c", "from harness.command_line.cli import plan; plan()", *words)


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of the sweep `name` in this folder, by path."""
    return [json.loads(path.read_text()) for path in sorted(Path("outputs", name).glob("*/record.json"))]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
