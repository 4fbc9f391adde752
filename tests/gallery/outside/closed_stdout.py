"""A sweep is started with a closed stdout, as cron and daemons do.

It ended with a traceback, "fork server: has ended", and left no record.
"""

from __future__ import annotations

import subprocess

from tests.gallery.outside._commands import ENVIRONMENT, PROGRAM, records

BEFORE = "0 records"
RIGHT = "1 records"


def answer() -> str:
    """Return how many records there are."""
    words = "model=mlp protocol=smoke ac=none tracker=none name=closed"
    line = ["bash", "-c", '"$@" >&-', "bash", *PROGRAM, "-m", *words.split()]
    subprocess.run(line, env=ENVIRONMENT, stderr=subprocess.DEVNULL, check=False)
    return f"{len(records('closed'))} records"
