"""The differential oracle: a slice of it finds nothing, and without a guard it finds what that is for."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.matrix.stale.engines import ENGINES
from tests.matrix.stale.examined import examine, until_silent
from tests.matrix.stale.guards import GUARDS

pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight",  # torch, of autocast
    "ignore:.*Gradients are those of the plain",  # a block that runs as it is, and is compared
)

MODELS = 26
"""Models of each engine, with 48 chains of changes: 4,992 programs in all."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MODELS))
@pytest.mark.parametrize("name", ENGINES)
def test_no_program_is_silent_or_crashes(name: str, seed: int) -> None:
    found, _ = ENGINES[name]().outcomes([seed], examine)
    assert [each for each in found if each.is_wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_that_is_switched_off_is_missed(guard: str) -> None:
    with GUARDS[guard]():
        found, _ = ENGINES["chunk"]().outcomes(range(10), until_silent())
    assert found[-1].what == "silent"


@pytest.mark.parametrize(("name", "seed"), [("chunk", 3), ("nested", 3), ("nested", 10)])
def test_a_slice_is_right(name: str, seed: int) -> None:
    found = list(examine(ENGINES[name](), seed, chains=2))
    assert len({each.chain for each in found}) == 2
    assert [each for each in found if each.is_wrong] == []


# guards that stand nowhere else: a hook or a forward inside of a block is refused where it is recorded too
@pytest.mark.parametrize(("guard", "seed"), [("aliasing", 1), ("attributes", 1)])
def test_a_guard_that_is_switched_off_is_missed(guard: str, seed: int) -> None:
    with GUARDS[guard]():
        found = list(islice(until_silent()(ENGINES["chunk"](), seed), 60))
    assert [each.what for each in found if each.is_wrong] == ["silent"]


@pytest.mark.parametrize(
    ("idiom", "seed"),
    [("checkpoints", 504), ("complex", 24), ("hooks", 0), ("configured", 54)],
)
def test_what_a_recording_does_not_see_is_found_where_nothing_is_proven(idiom: str, seed: int) -> None:
    """Two models that draw from generators of their own, of seeds 52 and 106, are no rows here.

    Each of their first 60 calls is right or refused, even where nothing is proven.
    """
    engine = ENGINES["chunk"]()
    with GUARDS["proof"]():
        without = list(islice(until_silent()(engine, seed), 60))
    assert without[-1].what == "silent"
    assert idiom in without[-1].idioms
    assert [each for each in examine(engine, seed, chains=1) if each.is_wrong] == []
