"""Sweeps on a private Slurm."""

from __future__ import annotations

import sys

from bench.output import run_part

PARTS = {
    "packing": "what a trivial point costs in one allocation, and as an array element",
    "scale": "whether a large sweep ends with every record",
}

if __name__ == "__main__":
    sys.exit(run_part("slurm", PARTS))
