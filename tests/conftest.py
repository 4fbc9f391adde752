"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.forkserver import ForkServer
from tests import rank_pool
from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_server() -> Iterator[ForkServer]:
    server = ForkServer(rank_pool.PRELOAD)
    yield server
    server.close()


@pytest.fixture(scope="session")
def pool2(rank_server: ForkServer) -> Iterator[RankPool]:
    pool = RankPool(rank_server, 2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4(rank_server: ForkServer) -> Iterator[RankPool]:
    pool = RankPool(rank_server, 4)
    yield pool
    pool.close()
