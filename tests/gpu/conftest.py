"""One agent for the folder: its fork server imports once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.ranks.agent import Agent


@pytest.fixture(scope="package")
def agent() -> Iterator[Agent]:
    with Agent(preload=("bench.trials", "tests.gpu.rank_entries")) as agent:
        yield agent
