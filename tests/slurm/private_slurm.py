"""A private Slurm for a block of code, gone with the process that asked for it, however that ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "cluster.sh"
NEEDED = ("munged", "sbatch", "slurmctld", "slurmd", "srun")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A running cluster; its nodes are 127.0.0.2 and on."""

    folder: Path
    nodes: int

    @property
    def conf(self) -> Path:
        """What SLURM_CONF must name."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.{2 + node}" for node in range(self.nodes))

    def run(self, *command: str) -> str:
        """Return what a command prints that talks to this cluster."""
        return subprocess.run(
            command,
            env=os.environ | {"SLURM_CONF": str(self.conf)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def require_binaries() -> None:
    """Skip where Slurm is not installed, with the reason; in CI that is a failure."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [program for program in NEEDED if shutil.which(program, path=path) is None]
    if not missing:
        return
    reason = f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def private_cluster(*, nodes: int = 2, cpus: int = 8, gpus: int = 4, settings: str = "") -> Iterator[Cluster]:
    """Start a cluster and stop it at the end of the block.

    A process of its own stops it when our end of a pipe closes: also when pytest is killed.

    Args:
        settings: of slurm.conf, by spaces (`MaxArraySize=4 MinJobAge=2`).
    """
    require_binaries()
    folder = Path(tempfile.mkdtemp(prefix="acb-", dir="/tmp"))  # pytest's own are too long for a socket
    variables = os.environ | {
        "CLUSTER_DIR": str(folder),
        "CLUSTER_NODES": str(nodes),
        "CLUSTER_CPUS": str(cpus),
        "CLUSTER_GPUS": str(gpus),
        "CLUSTER_SET": settings,
    }
    stop = f"cat; '{SCRIPT}' stop; rm -rf '{folder}'"
    with subprocess.Popen(["bash", "-c", stop], stdin=subprocess.PIPE, env=variables, start_new_session=True):
        started = subprocess.run(
            [SCRIPT, "start"], env=variables, capture_output=True, text=True, check=False, timeout=200
        )
        assert started.returncode == 0, started.stderr
        yield Cluster(folder=folder, nodes=nodes)
