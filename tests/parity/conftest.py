"""One way to prove a case on as many ranks as its mesh has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.experiment.experiment import Experiment
from tests.parity import cases
from tests.rank_pool import RankPool


@pytest.fixture
def unequal_ranks(request: pytest.FixtureRequest) -> Callable[[Experiment], dict[int, list[str]]]:
    """Return a function that proves a case and returns what differs from its twin, by rank that finds it."""

    def of(case: Experiment) -> dict[int, list[str]]:
        size = case.mesh.world_size
        if size == 1:
            found = [cases.prove(0, case)]
        else:
            pool: RankPool = request.getfixturevalue(f"pool{size}")  # ranks start where a case needs them
            found = pool.run(cases.prove, case)
        assert len(found) == size
        return {rank: differs for rank, differs in enumerate(found) if differs}

    return of
