"""Regions in regions."""

from __future__ import annotations

import sys

from bench.output import run_part

PARTS = {
    "levels": "what levels of regions keep, recompute and take of 64 equal blocks",
    "nested_models": "what becomes of other people's models under ac=nested",
}

if __name__ == "__main__":
    sys.exit(run_part("nested", PARTS))
