"""The cost of measuring a step and of checking it."""

from __future__ import annotations

import sys

from bench.output import run_part

PARTS = {
    "steps": "what timed steps cost beyond a bare training loop",
    "rewind": "time and memory of ac.rewind=true",
    "probes": "what the probes cost",
    "check_time": "what assert_neutral costs, quick and whole",
}

if __name__ == "__main__":
    sys.exit(run_part("instrumentation", PARTS))
