"""What tests of whole sweeps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.ranks.agent import Agent
from harness.ranks.forkserver import ForkServer
from tests.harness.sweeping import StandingAgent


@pytest.fixture(scope="session")
def standing_agent(rank_server: ForkServer) -> Iterator[Agent]:
    """Return an agent for sweeps of any number: torch is imported once for all their ranks."""
    agent = StandingAgent(rank_server)
    yield agent
    agent.close()
