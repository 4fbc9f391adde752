"""A step time is predicted for `hardware=this_cpu` on a machine where nobody has calibrated.

It came from the numbers of the machine that acbench is developed on, under the name of the user's.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.gallery.outside._commands import acbench_plan

BEFORE = "predicted without a measurement"
RIGHT = "measured here, then predicted"


def answer() -> str:
    """Return where the numbers come from."""
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
    done = acbench_plan("model=mlp", "hardware=this_cpu")
    if done.returncode:
        return f"exit {done.returncode}"
    is_measured = "measuring this CPU" in done.stderr and any(Path("cache", "acbench").glob("cpu-*.json"))
    return "measured here, then predicted" if is_measured else "predicted without a measurement"
