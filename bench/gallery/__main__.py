"""What the check says of known cases."""

from __future__ import annotations

import sys

from bench.output import run_part

PARTS = {
    "entries": "whether it finds every known silent defect, and passes every control",
    "outside": "what the cases of outsiders answer, now and before",
}

if __name__ == "__main__":
    sys.exit(run_part("gallery", PARTS))
