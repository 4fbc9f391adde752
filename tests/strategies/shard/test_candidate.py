from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from strategies import StrategyError
from strategies.shard.candidate import OneCandidate
from strategies.shard.model.shard_plan import ShardPlan
from tests.strategies.shard.models import AXIS, SAMPLE, Chain, Tied, meta

_COLUMN, _ROW, _BATCH = "RS0 = RR x RS0", "RR = RS0 x S0R", "S0R = S0R x RR_0"


@cache  # several tests look at one plan
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
    ("on_both", "on_tp"),
    [
        ("S0S1 = S0R x RS1_0", _COLUMN),
        ("S0R = S0S1 x S1R_0", _ROW),
        ("S01R = S01R x RR_0", _BATCH),
        ("S01R = S01R x RR_0_1", "S0R = S0R x RR_1"),
    ],
)
def test_data_parallel_ranks_are_the_first_of_two_axes(on_both: str, on_tp: str) -> None:
    strategy = OneCandidate(candidate=on_both, modules="*.up")
    names = strategy.plan(meta(Chain), SAMPLE, replace(AXIS, data_ranks=2)).as_json()["candidates"]
    assert names == _plan(on_tp, "*.up").as_json()["candidates"]
    assert names["blocks.0.up"] == on_tp


def test_a_name_without_a_second_axis_is_of_tp_on_every_mesh() -> None:
    strategy = OneCandidate(candidate=_BATCH, modules="*.up")
    plan = strategy.plan(meta(Chain), SAMPLE, replace(AXIS, data_ranks=2))
    assert plan.as_json() == _plan(_BATCH, "*.up").as_json()


def test_a_name_that_data_parallel_ranks_cannot_have_is_refused_with_those_that_exist() -> None:
    with pytest.raises(StrategyError) as refusal:
        OneCandidate(candidate="S1S0 = S1R x RS0_0", modules="*.up").plan(
            meta(Chain), SAMPLE, replace(AXIS, data_ranks=2)
        )
    assert str(refusal.value) == (
        "shard.candidate: 'blocks.0.up' has no candidate 'S1S0 = S1R x RS0_0' on axes 0, the data-parallel "
        "ranks with rows of their own, and 1, tp, or on tp alone; it has: RR = RR x RR, S0R = S0R x RR_0, "
        "S0R = S0R x RR_1, RR = RS0 x S0R, RS0 = RR x RS0, S01R = S01R x RR_0, S01R = S01R x RR_0_1, "
        "S0R = S0S1 x S1R_0, S0S1 = S0R x RS1_0"
    )


@pytest.mark.parametrize(
    ("candidate", "modules", "message"),
    [
        pytest.param(
            "S0S1 = S0R x RS1_0",
            "*.up",
            "shard.candidate: 'blocks.0.up' has no candidate 'S0S1 = S0R x RS1_0', because there are no "
            "data-parallel ranks to be axis 0; use mesh=shard2_tp2; it has: RR = RR x RR, S0R = S0R x RR_0, "
            "S0R = S0R x RR_1, RR = RS0 x S0R, RS0 = RR x RS0",
            id="a name on two axes where there is one",
        ),
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


def test_a_tied_head_stays_replicated_and_the_plan_says_why() -> None:
    written = OneCandidate(candidate=_COLUMN).plan(meta(Tied), SAMPLE, AXIS).as_json()
    assert written["kept_whole"] == {"head": "shares its weight with 'embedding'"}
    assert written["candidates"]["head"] == "RR = RR x RR"
    assert written["candidates"]["blocks.0.up"] == _COLUMN
    assert "kept_whole" not in _plan(_COLUMN).as_json()


def test_a_tied_head_runs_on_rows() -> None:
    written = OneCandidate(candidate=_BATCH, modules="head").plan(meta(Tied), SAMPLE, AXIS).as_json()
    assert written["candidates"]["head"] == _BATCH
    assert "kept_whole" not in written


def test_a_tied_head_alone_is_refused_by_name() -> None:
    with pytest.raises(StrategyError) as refusal:
        OneCandidate(candidate=_COLUMN, modules="he*").plan(meta(Tied), SAMPLE, AXIS)
    assert str(refusal.value) == (
        "shard.modules: 'head' shares its weight with 'embedding', so that it is not split, and 'he*' "
        "matches nothing else; use a candidate of rows, S0R = S0R x RR_0"
    )


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
