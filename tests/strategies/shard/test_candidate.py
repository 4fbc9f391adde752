from __future__ import annotations

import pytest

from strategies import StrategyError
from strategies.shard.candidate import OneCandidate
from strategies.shard.plans import ShardPlan
from tests.strategies.shard.models import AXIS, SAMPLE, Chain, meta

_COLUMN, _ROW, _BATCH = "RS0 = RR x RS0", "RR = RS0 x S0R", "S0R = S0R x RR_0"


def _plan(candidate: str, modules: str = "*", dropout: float = 0.0) -> ShardPlan:
    return OneCandidate(candidate=candidate, modules=modules).plan(meta(Chain, dropout=dropout), SAMPLE, AXIS)


@pytest.mark.parametrize(
    ("candidate", "modules", "matched"),
    [
        pytest.param(_COLUMN, "*.up", ["blocks.0.up", "blocks.1.up"], id="one linear of each block"),
        pytest.param(_ROW, "blocks.1.*", ["blocks.1.up", "blocks.1.down"], id="both linears of one block"),
        pytest.param(_BATCH, "head", ["head"], id="one linear"),
    ],
)
def test_matching_linears_run_by_it_and_others_replicated(
    candidate: str, modules: str, matched: list[str]
) -> None:
    names = _plan(candidate, modules).as_json()["candidates"]
    assert [fqn for fqn, name in names.items() if name == candidate] == matched
    assert {name for fqn, name in names.items() if fqn not in matched} <= {"RR = RR x RR", "replicated"}


def test_what_lies_between_two_of_them_stays_sharded() -> None:
    assert _plan(_BATCH, "blocks.0.*").as_json()["resharding"] == [
        {"module": "blocks.0.up", "operand": "input", "from": "R", "to": "S0"},
        {"module": "blocks.0.down", "operand": "output", "from": "S0", "to": "R"},
    ]


@pytest.mark.parametrize(
    ("candidate", "modules", "message"),
    [
        pytest.param(
            "S1R = S1R x RR",
            "*.up",
            "shard.candidate: 'blocks.0.up' has no candidate 'S1R = S1R x RR'; it has: RR = RR x RR, "
            "S0R = S0R x RR_0, S0R = S0R x RR_1, RR = RS0 x S0R, RS0 = RR x RS0",
            id="an unknown candidate",
        ),
        pytest.param(
            _COLUMN,
            "layers.*",
            "shard.modules: 'layers.*' matches no linear; there are "
            "blocks.0.up, blocks.0.down, blocks.1.up, blocks.1.down, ...",
            id="a pattern without linears",
        ),
    ],
)
def test_refusals_name_what_there_is(candidate: str, modules: str, message: str) -> None:
    with pytest.raises(StrategyError) as refusal:
        _plan(candidate, modules)
    assert str(refusal.value) == message


def test_refuses_other_random_numbers_than_the_twin_has() -> None:
    with pytest.raises(StrategyError) as refusal:
        _plan(_BATCH, "*.up", dropout=0.1)
    assert str(refusal.value) == (
        "shard.candidate: 'S0R = S0R x RR_0' would draw other random numbers than shard=none; "
        "use model.dropout=0, or other modules"
    )


def test_refuses_a_pattern_that_is_no_text() -> None:
    with pytest.raises(StrategyError) as refusal:
        OneCandidate(modules=1)  # type: ignore[arg-type]
    assert str(refusal.value) == "shard.modules: must be str, got 1"
