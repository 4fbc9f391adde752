"""A sweep is submitted to a Slurm whose daemons do not answer, and then looked at.

Nothing had run, and its points counted as run elsewhere.
"""

from __future__ import annotations

import os
import shutil

from tests.gallery.outside._commands import NEEDS_SLURM, acbench

BEFORE = "2 elsewhere"
RIGHT = "0 elsewhere"


def answer() -> str:
    """Return how many points a dry run finds elsewhere after Slurm has refused them."""
    if shutil.which("sbatch") is None:
        return NEEDS_SLURM
    os.environ["SLURM_CONF"] = "/nowhere/slurm.conf"
    points = "model=mlp", "ac=none,full", "mesh=shard2", "protocol=parity", "tracker=none", "name=c"
    acbench("-m", *points, "hydra/launcher=slurm", "hydra.launcher.partition=gpu")
    listed = acbench("--dry-run", "-m", *points).stdout
    return f"{sum(' elsewhere ' in line for line in listed.splitlines())} elsewhere"
