"""Sweeps through real daemons: submitted, killed, collected, cancelled, and equal to what runs here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.ranks.forkserver import ForkServer
from tests.forked_servers import forks_of
from tests.harness import command
from tests.slurm.private_slurm import Cluster

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = (
    "model=mlp",
    "model.n_layers=2",
    "model.width=8",
    "model.hidden_width=8",
    "data=synthetic",
    "batch_size=4",
    "sequence_length=8",
    "mesh.device=cpu",
    "protocol=smoke",
    "protocol.timed_pairs=0",
    "protocol.parity_steps=1",
    "tracker=none",
)
TINY = "model=python model.factory=tests.slurm.starts:counted data=synthetic mesh.device=cpu protocol=smoke"
POLL = "hydra.launcher.poll_s=0.2"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sweeps:
    """Commands of one user in one folder of results."""

    folder: Path

    def start(self, *words: str) -> subprocess.Popen[str]:
        starts = self.folder / "starts"
        starts.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "harness", "-m", f"outputs_dir={self.folder}", *words],
            cwd=ROOT,
            env=os.environ | {"ACBENCH_STARTS": str(starts)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end and return what it says."""
        process = self.start(*words)
        _, said = process.communicate()
        assert process.returncode == code, said
        return said

    def records(self, name: str) -> dict[str, dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in self.folder.glob(f"{name}/*/record.json")]
        return {record["trial_id"]: record for record in found}

    def starts(self) -> list[str]:
        """Return the trials that have started, once for each start."""
        return sorted(path.name.partition(".")[0] for path in (self.folder / "starts").iterdir())


@pytest.fixture
def sweeps(tmp_path: Path) -> _Sweeps:
    return _Sweeps(folder=tmp_path)


def _tiny(name: str, *words: str) -> list[str]:
    rest = ["protocol.timed_pairs=0", "protocol.parity_steps=1", "tracker=none"]
    return [*TINY.split(), "batch_size=4", "sequence_length=8", *rest, f"name={name}", *words]


@contextlib.contextmanager
def _drained(cluster: Cluster) -> Iterator[None]:
    """Let no job start in the block."""
    cluster.run("scontrol", "update", "partitionname=main", "state=down")
    try:
        yield
    finally:
        cluster.run("scontrol", "update", "partitionname=main", "state=up")


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal wherever a trial runs."""
    return {key: record[key] for key in ("status", "verdict", "parity", "memory", "work", "error", "plan")}


@pytest.mark.usefixtures("cluster")
def test_two_nodes_of_two_ranks_measure_what_four_ranks_here_do(
    sweeps: _Sweeps, rank_server: ForkServer
) -> None:
    point = (*SMALL, "ac=full", "mesh=hsdp2x2")
    sweeps.run("name=nodes", "hydra/launcher=slurm", POLL, *point, "mesh.nodes=2")
    words = ("-m", f"outputs_dir={sweeps.folder}", "name=here", *point)
    with forks_of(rank_server), closing(ForkServer(command.PRELOAD)) as server:
        done = command.acbench(server, ROOT, words, dict(os.environ))
    assert done.code == 0, done.stderr
    (spread,), (here,) = (sweeps.records(name).values() for name in ("nodes", "here"))
    assert spread["environment"]["job"]["hosts"] == ["127.0.0.2", "127.0.0.3"]
    assert _comparable(spread) == _comparable(here)


@pytest.mark.usefixtures("cluster")
def test_two_shapes_in_one_command_and_nothing_to_do_for_the_next(sweeps: _Sweeps) -> None:
    words = _tiny("shapes", "hydra/launcher=slurm", POLL, "mesh=single,ddp2")
    said = sweeps.run(*words)
    assert "2 points: 2 to run, 0 done, 0 duplicates; shapes 1x1: 1, 1x2: 1\n" in said
    assert re.search(r"submitted 2 points as Slurm jobs \d+, \d+\n", said)
    assert [record["status"] for record in sweeps.records("shapes").values()] == ["ok"] * 2
    assert "2 points: 0 to run, 2 done, 0 duplicates\n" in sweeps.run(*words)
    assert len(sweeps.starts()) == 2


def test_a_killed_driver_an_impatient_one_and_a_cancelled_job(cluster: Cluster, sweeps: _Sweeps) -> None:
    words = _tiny("killed", "hydra/launcher=slurm", POLL, "seed=0,1")
    with _drained(cluster):
        driver = sweeps.start(*words)
        assert driver.stderr is not None
        assert any(line.startswith("submitted 2 points") for line in driver.stderr)
        driver.kill()
        driver.communicate()

        said = sweeps.run(*words, "hydra.launcher.wait=false")
        assert "2 points: 0 to run, 0 done, 2 in flight, 0 duplicates\n" in said
        assert "acbench: 2 without a record yet; the same command continues\n" in said
        (job, *_) = cluster.run("squeue", "--array", "--noheader", "--format=%F_%K").split()
        cluster.run("scancel", job)
    assert "2 points: 0 to run" in sweeps.run(*words, code=1)

    records = sweeps.records("killed").values()
    assert sorted(record["status"] for record in records) == ["lost", "ok"]
    (lost,) = (record for record in records if record["status"] == "lost")
    # of an element that was cancelled while it waited, some versions of Slurm keep nothing
    assert (lost["error"]["kind"], lost["error"]["message"]) in {
        ("CANCELLED", f"job {job} was cancelled"),
        (
            "unknown",
            f"Slurm no longer knows job {job}: it was cancelled before it started, or ended long ago",
        ),
    }
    good = sorted(record["trial_id"] for record in records if record["status"] == "ok")
    assert sweeps.starts() == good


@pytest.mark.usefixtures("cluster")
def test_two_drivers_at_once_on_one_folder_start_nothing_twice(sweeps: _Sweeps) -> None:
    packed = ("hydra/launcher=slurm_packed", "hydra.launcher.cpus_per_node=1", POLL)
    words = _tiny("two", *packed, "seed=0,1")
    drivers = [sweeps.start(*words) for _ in range(2)]
    told = [driver.communicate()[1] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], told
    records = sweeps.records("two")
    assert [record["status"] for record in records.values()] == ["ok"] * 2
    assert sweeps.starts() == sorted(records)
