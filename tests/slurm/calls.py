"""What the jobs of these tests do on their nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from harness.launchers.slurm_submit import JobCall


def call_of(function: Callable[..., None], *arguments: object) -> JobCall:
    """Return the call of a function of this module with these arguments, as text."""
    program = "import sys; from tests.slurm import calls; getattr(calls, sys.argv[1])(*sys.argv[2:])"
    return JobCall(("-c", program, function.__name__, *map(str, arguments)))


def leave(folder: str, code: str = "0") -> None:
    """Write the variables that Slurm has set, in a file named by job and node, and exit."""
    node = os.environ["SLURM_NODEID"]
    job = os.environ.get("SLURM_ARRAY_TASK_ID", os.environ["SLURM_JOB_ID"])
    seen = {
        name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SRUN_", "CUDA_"))
    }
    (Path(folder) / f"{job}.node{node}.json").write_text(json.dumps(seen))
    raise SystemExit(int(code))


def stay(folder: str) -> None:
    """Say that this node has started, and stay until `release` is there.

    A job that was requeued leaves at once.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    (Path(folder) / f"started.{os.environ['SLURM_NODEID']}.{restarts}").touch()
    while restarts == "0" and not (Path(folder) / "release").exists():
        time.sleep(0.05)
