"""The script behind the other tests: what it starts, that it leaves nothing, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.slurm.private_slurm import SCRIPT, Cluster, private_cluster, require_binaries

ROOT = SCRIPT.parents[1]
EXAMPLES = sorted((ROOT / "slurm" / "examples").glob("*.sbatch"))
PATIENCE_S = 100
OWNER = """
import time
from tests.slurm.private_slurm import private_cluster
with private_cluster(nodes=1) as cluster:
    print(cluster.folder, flush=True)
    time.sleep(1000)
"""


def _script(command: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, command], env=os.environ | variables, capture_output=True, text=True, check=False
    )


def _processes(folder: Path) -> list[str]:
    """Return what lives in an environment that names this cluster."""
    wanted = f"SLURM_CONF={folder}/etc/slurm.conf".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "comm").read_text().strip())
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_jobs_get_devices_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    # each holds its devices until both have theirs
    here = f"touch '{tmp_path}'/\\$SLURM_STEP_ID"
    both = f"until [ -e '{tmp_path}/0' -a -e '{tmp_path}/1' ]; do sleep 0.1; done"
    told = f'sh -c "printenv CUDA_VISIBLE_DEVICES; {here}; {both}"'
    ask = f"--gpus-per-node=2 --exact --ntasks=1 {told}"
    steps = f"srun {ask} & srun {ask} & wait"
    printed = cluster.run("salloc", "--nodes=1", "--gpus-per-node=4", "--ntasks=2", "bash", "-c", steps)
    assert sorted(printed.split()) == ["0,1", "2,3"]


def test_nodes_are_named_by_addresses(cluster: Cluster) -> None:
    printed = cluster.run("srun", "--nodes=2", "--label", "printenv", "SLURMD_NODENAME")
    assert sorted(printed.splitlines()) == ["0: 127.0.0.2", "1: 127.0.0.3"]


def test_the_script_starts_once_reports_and_leaves_nothing() -> None:
    require_binaries()
    with private_cluster(nodes=1, gpus=0, settings="MaxArraySize=7 KillWait=9") as first:
        variables = {"CLUSTER_DIR": str(first.folder)}
        line = f"export SLURM_CONF={first.conf}\n"
        assert _script("env", variables).stdout == line
        before = sorted(_processes(first.folder))
        assert (_script("start", variables).stdout, sorted(_processes(first.folder))) == (line, before)
        assert _script("status", variables).returncode == 0
        assert "MaxArraySize            = 7\n" in first.run("scontrol", "show", "config")
        with private_cluster(nodes=3) as second:  # beside the first one
            assert second.run("sinfo", "--noheader", "--partition=main", "--format=%D %G") == "3 gpu:4\n"
            second.run("srun", "--nodes=3", "true")
        assert _processes(second.folder) == []
        assert first.run("sinfo", "--noheader", "--partition=main", "--format=%D %G") == "1 gpu:0\n"
        # a job that ignores SIGTERM, and what it has put out of its own reach
        job = "trap '' TERM; setsid sleep 1000 & srun --overlap sleep 1000"
        first.run("sbatch", "--output=/dev/null", "--wrap", job)
        _await(lambda: _processes(first.folder).count("sleep") >= 2)
        assert (_script("stop", variables).returncode, _processes(first.folder)) == (0, [])
        assert _script("status", variables).returncode == 1
        assert _script("stop", variables).returncode == 0
        assert [path.name for path in first.folder.iterdir()] == ["log"]
    assert not first.folder.exists()


def test_a_cluster_does_not_outlive_its_owner() -> None:
    require_binaries()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert "slurmctld" in _processes(folder)
        owner.send_signal(signal.SIGKILL)
    _await(lambda: _processes(folder) == [] and not folder.exists())


def test_what_cannot_work_is_refused() -> None:
    require_binaries()
    folder = "/tmp/" + "x" * 80
    refused = _script("start", {"CLUSTER_DIR": folder})
    assert (refused.returncode, refused.stderr) == (
        1,
        f"cluster.sh: CLUSTER_DIR: must be at most 80 bytes, got {folder}\n",
    )
    refused = _script("begin", {})
    assert refused.returncode == 2
    assert refused.stderr.startswith("A private, throw-away Slurm of several nodes")
    assert refused.stderr.splitlines()[-1].startswith("  CLUSTER_SET ")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_what_slurm_takes(cluster: Cluster, example: Path) -> None:
    said = subprocess.run(
        ["sbatch", "--test-only", "--time=1", str(example)],
        env=os.environ | {"SLURM_CONF": str(cluster.conf)},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (said.returncode, "to start at" in said.stderr) == (0, True), said.stderr


def _await(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, f"not within {PATIENCE_S} s"
        time.sleep(0.1)
