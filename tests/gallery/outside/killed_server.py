"""The process that forks ranks and checks models is killed while a sweep is planned.

The command ended with a traceback and no record.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

from harness.process_tree import children_of
from tests.gallery.outside._commands import ENVIRONMENT, PROGRAM, records

BEFORE = "exit 1 with a traceback, 0 records"
RIGHT = "exit 0, 2 records"

_POLL_S = 0.05


def answer() -> str:
    """Return how the command ends, and how many records it leaves."""
    words = "model=mlp protocol=smoke ac=none,full tracker=none name=killed"
    sweep = subprocess.Popen(
        [*PROGRAM, "-m", *words.split()],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while sweep.poll() is None and not (servers := children_of(sweep.pid)):
        time.sleep(_POLL_S)
    time.sleep(1.0)
    with suppress(ProcessLookupError):
        os.kill(servers[0], signal.SIGKILL)
    _, said = sweep.communicate()
    how = " with a traceback" if "Traceback" in said else ""
    return f"exit {sweep.returncode}{how}, {len(records('killed'))} records"
