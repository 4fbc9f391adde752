"""What the jobs of these tests do on their nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path


def leave(folder: Path, code: int = 0) -> None:
    """Write the variables that Slurm has set, in a file named by job and node, and exit."""
    node = os.environ["SLURM_NODEID"]
    job = os.environ.get("SLURM_ARRAY_TASK_ID", os.environ["SLURM_JOB_ID"])
    seen = {
        name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SRUN_", "CUDA_"))
    }
    (folder / f"{job}.node{node}.json").write_text(json.dumps(seen))
    raise SystemExit(code)


def stay(folder: Path) -> None:
    """Say that this node has started, and stay until `release` is there.

    A job that was requeued leaves at once.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    (folder / f"started.{os.environ['SLURM_NODEID']}.{restarts}").touch()
    while restarts == "0" and not (folder / "release").exists():
        time.sleep(0.05)
