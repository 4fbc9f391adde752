"""A packed job of Slurm is cancelled while its first trials run.

Most records blamed a lane that had ended "before the trial began", and named a log that does not exist.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from tests.gallery.outside._commands import ENVIRONMENT, NEEDS_SLURM, PROGRAM, private_slurm, records

BEFORE = "1 of 8 CANCELLED"
RIGHT = "8 of 8 CANCELLED"

_MODEL = """import os, time, torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, x):
        if not x.is_meta and "RANK" in os.environ:
            time.sleep(3)
        for block in self.blocks:
            x = block(x)
        return x

def make(salt=0):
    return Slow(), (torch.randn(8, 8),), lambda output: output.square().mean()
"""
_START_S = 120.0


def answer() -> str:
    """Return how many of the records say that the job was cancelled."""
    if shutil.which("sbatch") is None:
        return NEEDS_SLURM
    Path("slow.py").write_text(_MODEL)
    words = (
        "model=python model.factory=slow:make model.layers_fqn=blocks protocol=parity protocol.parity_steps=1"
    )
    more = (
        "protocol.probes=false tracker=none hydra/launcher=slurm_packed hydra.launcher.max_parallel=2 name=p"
    )
    with private_slurm() as environment:
        known = ENVIRONMENT | environment
        sweep = subprocess.Popen(
            [*PROGRAM, "-m", *words.split(), *more.split(), "ac=none,full", "model.kwargs.salt=1,2,3,4"],
            env=known,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + _START_S
        while not list(Path("outputs/p").glob("*/rank0.json")) and time.monotonic() < end_s:
            time.sleep(0.2)
        time.sleep(1.0)
        jobs = subprocess.check_output([_found("squeue"), "-h", "-o", "%A"], env=known, text=True).split()
        subprocess.run([_found("scancel"), *jobs], env=known, check=False)
        sweep.wait()
    kinds = [(each["error"] or {}).get("kind") for each in records("p")]
    return f"{kinds.count('CANCELLED')} of 8 CANCELLED"


def _found(program: str) -> str:
    return shutil.which(program) or program
