"""What a trivial point costs in one allocation, and as an element of a job array: side by side on one Slurm.

Packed: the time between the ends of two consecutive trials of one lane, from their records. Array: from the
start of an element to its end, as Slurm says it (whole seconds). One trial runs at a time either way, and
batches of the two alternate.

    python -m bench.slurm --part packing --points 20 --batches 4
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.table import Table

from bench.output import parser, publish
from bench.slurm.sweeps import Sweep, private_slurm
from bench.table import sample_table

TARGET_RATIO = 5
"""How many times cheaper a packed point should be."""

_OPTIONS = {
    "slurm_packed": ("hydra.launcher.cpus_per_node=1", "hydra.launcher.gpus_per_node=0"),
    "slurm": ("hydra.launcher.array_parallelism=1", "hydra.launcher.gpus_per_node=0"),
}


def main(words: Sequence[str]) -> int:
    """Measure, print, write; times are never a reason to fail."""
    made = parser(__doc__, "packing", "slurm")
    made.add_argument("--points", type=int, default=20, help="of each launcher")
    made.add_argument("--batches", type=int, default=4, help="of each launcher, <= points")
    options = made.parse_args(words)
    size = options.points // options.batches
    packed_s: list[float] = []
    array_s: list[float] = []
    with private_slurm(nodes=1), tempfile.TemporaryDirectory() as folder:
        for batch in range(options.batches):
            # a lane has no end before its first trial: one more point gives as many spans
            packed_s += _packed_s(_run(folder, "slurm_packed", batch, size + 1))
            array_s += _array_s(_run(folder, "slurm", batch, size))
    ratio = median(array_s) / median(packed_s)
    protocol = {"points": options.points, "batches": options.batches, "order": "packed, array, packed, ..."}
    results = {"packed_s": packed_s, "array_s": array_s, "array_over_packed": ratio}
    publish(_table(packed_s, array_s, ratio), options.out, protocol=protocol, results=results)
    return 0


def _run(folder: str, launcher: str, batch: int, points: int) -> Sweep:
    overrides = (f"hydra/launcher={launcher}", f"seed=range(0,{points})", *_OPTIONS[launcher])
    sweep = Sweep(outputs_dir=Path(folder), name=f"{launcher}{batch}", overrides=overrides)
    sweep.run()
    return sweep


def _packed_s(sweep: Sweep) -> list[float]:
    ends = sorted(datetime.fromisoformat(record["finished_at"]) for record in sweep.records().values())
    return [(later - earlier).total_seconds() for earlier, later in pairwise(ends)]


def _array_s(sweep: Sweep) -> list[float]:
    array = {record["environment"]["job"]["id"].partition("_")[0] for record in sweep.records().values()}
    command = [
        "squeue",
        "--array",
        "--noheader",
        "--states=all",
        "--format=%S %e",
        f"--jobs={','.join(array)}",
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    spans = [[datetime.fromisoformat(word) for word in line.split()] for line in lines]
    return [(end - start).total_seconds() for start, end in spans]


def _table(packed_s: Sequence[float], array_s: Sequence[float], ratio: float) -> Table:
    return sample_table(
        {"slurm_packed": packed_s, "slurm": array_s},
        title=f"Time of a trivial point, seconds; an element of an array costs {ratio:.1f} packed points",
        caption=f"target: at least {TARGET_RATIO}",
    )
