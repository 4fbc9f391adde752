"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from harness.ranks.forkserver import ForkServer
from tests import rank_pool
from tests.rank_pool import RankPool

LONG = (
    "tests/slurm/test_faults.py",
    "tests/parity/test_matrix.py",
    "tests/slurm/",
    "tests/parity/",
    "tests/harness/test_cli.py",
    "tests/harness/trial/test_run.py",
    "tests/strategies/chunk/",
)
"""Files that take a minute or more: first, so that no worker is alone with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return next((place for place, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))


def pytest_collection_finish() -> None:
    """Keep what is imported and collected, most of the heap, out of all collections of garbage."""
    gc.collect()
    gc.freeze()


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
