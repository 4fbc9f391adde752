from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from strategies.base import StrategyError
from strategies.shard.base import Sharding
from strategies.shard.candidate import OneCandidate
from strategies.shard.cheapest import Cheapest
from strategies.shard.megatron import Megatron
from strategies.shard.model.proof import Results
from tests.counted_collectives import Counts
from tests.rank_pool import RankPool
from tests.strategies.shard import placed_ranks

_SLOW = {"latency_s": 0.0, "flops_per_s": 1e6, "bandwidth_bytes_per_s": 3e9}
_BATCH = OneCandidate(candidate="S0R = S0R x RR_0")
STRATEGIES = [
    pytest.param(Megatron(), id="megatron"),
    pytest.param(OneCandidate(), id="output features"),
    pytest.param(OneCandidate(candidate="RR = RS0 x S0R"), id="input features"),
    pytest.param(_BATCH, id="batch"),
    pytest.param(OneCandidate(candidate="S0R = S0R x RR_1", modules="*down"), id="sequence, of some"),
    pytest.param(OneCandidate(candidate="RR = RR x RR"), id="nothing"),
    pytest.param(Cheapest(), id="cheapest"),
    pytest.param(Cheapest(**_SLOW), id="cheapest on slow ranks"),  # type: ignore[arg-type]
    pytest.param(Cheapest(memory_limit_mib=0.027), id="cheapest within little memory"),
]


@cache  # two tests look at one run
def _examined(pool2: RankPool, strategy: Sharding) -> list[tuple[list[str], Counts, Counts]]:
    return pool2.run(placed_ranks.examine, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_are_those_of_the_plan(pool2: RankPool, strategy: Sharding) -> None:
    for _, promised, counted in _examined(pool2, strategy):
        assert counted == promised


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_computes_what_the_dense_model_does(pool2: RankPool, strategy: Sharding) -> None:
    assert [differences for differences, _, _ in _examined(pool2, strategy)] == [[], []]


@pytest.mark.parametrize(
    ("strategy", "fqn", "what", "wrong"),
    [
        pytest.param(
            _BATCH,
            "blocks.1.down",
            "parameters",
            ["blocks.1.down.weight", "blocks.1.down.bias"],
            id="weight gradients",
        ),
        pytest.param(
            Megatron(),
            "blocks.0.up",
            "input",
            ["embedding.weight", "blocks.0.norm.weight", "blocks.0.norm.bias"],
            id="input gradients",
        ),
    ],
)
def test_a_forgotten_reduction_is_seen(
    pool2: RankPool, strategy: Sharding, fqn: str, what: str, wrong: list[str]
) -> None:
    assert pool2.run(placed_ranks.planted, strategy, fqn, what) == [wrong, wrong]


@pytest.mark.parametrize(
    ("strategy", "fqn", "what", "first"),
    [
        pytest.param(Megatron(), "", "", None, id="nothing"),
        pytest.param(_BATCH, "blocks.1.down", "parameters", "blocks.1.down.weight", id="weight gradients"),
        pytest.param(Megatron(), "blocks.0.up", "input", "embedding.weight", id="input gradients"),
    ],
)
def test_a_plan_is_proven_with_a_sample(
    pool2: RankPool, strategy: Sharding, fqn: str, what: str, first: str | None
) -> None:
    found = pool2.run(placed_ranks.proof_of, strategy, fqn, what)
    if first is None:
        assert found == ["", ""]
        return
    begin = f"shard: the plan does not do what the dense model does: the gradient of {first!r} is "
    remedy = "take out of forward what no plan follows, or use shard=none"
    end = f" off, where 0.0001 of the largest is allowed; {remedy}"
    assert all(each.startswith(begin) and each.endswith(end) for each in found)


def test_what_draws_random_numbers_is_not_proven() -> None:
    with pytest.raises(StrategyError) as refused:
        Results.of(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), (torch.ones(2),))
    problem = "'Sequential' draws random numbers, and each rank draws its own"
    assert str(refused.value) == f"shard: {problem}; prove it in evaluation, or with dropout 0"


def test_only_what_is_split_becomes_a_dtensor(pool2: RankPool) -> None:
    expected = {
        f"blocks.{index}.{name}": placement
        for index in range(2)
        for name, placement in (
            ("up.weight", "S(0)"),
            ("up.bias", "S(0)"),
            ("down.weight", "S(1)"),
        )
    }
    assert pool2.run(placed_ranks.placements, Megatron()) == [expected, expected]


@pytest.mark.parametrize(
    ("ranks", "times", "message"),
    [
        pytest.param(4, 1, "shard: needs a mesh of 4 ranks, got (2,)", id="another mesh"),
        pytest.param(2, 2, "shard: needs a plain model; apply it once, and before regions", id="twice"),
    ],
)
def test_refusals(pool2: RankPool, ranks: int, times: int, message: str) -> None:
    assert Counter(pool2.run(placed_ranks.refusal, Megatron(), ranks, times)) == {message: 2}
