from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from bench.collectives import Counts
from strategies.shard.base import Sharding
from strategies.shard.candidate import OneCandidate
from strategies.shard.cheapest import Cheapest
from strategies.shard.megatron import Megatron
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
