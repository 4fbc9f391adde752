"""One agent for the folder, whose fork server imports once, and the trials that it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.trials import PRELOAD, records
from harness.ranks.agent import Agent
from harness.ranks.forkserver import ForkServer
from tests.forked_servers import forks_of
from tests.matrix.facts import Run


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where trials of these tests compute: `--device`."""
    chosen: str = request.config.getoption("device")
    return chosen


@pytest.fixture(scope="package")
def agent(rank_server: ForkServer) -> Iterator[Agent]:
    with forks_of(rank_server), Agent(preload=PRELOAD) as agent:
        yield agent


@pytest.fixture
def run(agent: Agent, tmp_path: Path) -> Run:
    """Return a function that runs experiments of one mesh in one set of ranks."""
    return lambda chosen: records(agent, chosen, tmp_path)
