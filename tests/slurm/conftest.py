"""Tests of this folder talk to real Slurm daemons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.launchers.slurm_client import cancel
from tests.slurm.private_slurm import Cluster, private_cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    with private_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes of eight CPUs and four GPUs, which this test's commands talk to; its jobs end with it."""
    monkeypatch.setenv("SLURM_CONF", str(shared_cluster.conf))
    yield shared_cluster
    cancel(shared_cluster.run("squeue", "--noheader", "--format=%F").split())
