from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from harness.models.base import ModelSpec
from strategies import StrategyError
from strategies.shard.cheapest import Cheapest
from strategies.shard.megatron import Megatron
from strategies.shard.model.graph import TensorAxis
from strategies.shard.model.shard_plan import ShardPlan
from tests.parity.cases import MODELS
from tests.strategies.shard.models import AXIS, SAMPLE, Chain, meta

_MIB = 1 << 20
_SLOW = {"latency_s": 0.0, "flops_per_s": 1e9, "bandwidth_bytes_per_s": 3e9}


@cache  # several tests look at one plan
def _plan(
    spec: ModelSpec,
    strategy: Cheapest | Megatron,
    *,
    tokens: tuple[int, int] = (4, 16),
    parameter_shards: int = 1,
) -> ShardPlan:
    with torch.device("meta"):
        model = spec.build().train()
        sample = (torch.zeros(tokens, dtype=torch.int64),)
    axis = TensorAxis(ranks=2, splits=spec.tensor_parallel_plan(), parameter_shards=parameter_shards)
    return strategy.plan(model, sample, axis)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("tokens", [(4, 16), (2, 16)], ids=["tp2", "shard2_tp2"])
@pytest.mark.parametrize("hardware", [{}, _SLOW], ids=["default", "slow ranks"])
def test_never_costs_more_than_megatron(
    name: str, tokens: tuple[int, int], hardware: dict[str, float]
) -> None:
    spec = MODELS[name]
    chosen = _plan(spec, Cheapest(**hardware), tokens=tokens)  # type: ignore[arg-type]
    reference = _plan(spec, Megatron(), tokens=tokens)
    assert chosen.communicated_bytes <= reference.communicated_bytes
    if not hardware:  # by which Megatron's plan is reckoned
        assert chosen.seconds <= reference.seconds


def test_small_models_are_replicated_because_latency_is_everything() -> None:
    plan = _plan(MODELS["gpt"], Cheapest())
    assert plan.collectives == ()
    assert {name.count("S") for name in plan.as_json()["candidates"].values()} == {0}


def test_columns_of_one_input_share_an_all_reduce() -> None:
    """Query, key and value read one tensor; Megatron's plan sums its gradient three times."""
    chosen = _plan(MODELS["gpt"], Cheapest(**_SLOW))  # type: ignore[arg-type]
    written = chosen.as_json()
    assert written["candidates"]["layers.0.attention.wq"] == "RS0 = RR x RS0"
    assert {"module": "layers.0.attention_norm", "operand": "output", "from": "R", "to": "R*"} in written[
        "resharding"
    ]
    assert chosen.communicated_bytes < _plan(MODELS["gpt"], Megatron()).communicated_bytes


@pytest.mark.parametrize("limit_mib", [0.27, 0.4])
def test_stays_within_its_memory(limit_mib: float) -> None:
    free = _plan(MODELS["gpt"], Cheapest())
    chosen = _plan(MODELS["gpt"], Cheapest(memory_limit_mib=limit_mib))
    assert chosen.memory_bytes <= limit_mib * _MIB < free.memory_bytes
    assert chosen.seconds >= free.seconds


def test_a_limit_of_more_bytes_than_there_are_limits_nothing() -> None:
    free = _plan(MODELS["gpt"], Cheapest(memory_limit_mib=1e6))
    assert _plan(MODELS["gpt"], Cheapest(memory_limit_mib=1e308)) == free


def test_less_memory_takes_no_less_time() -> None:
    times = [_plan(MODELS["gpt"], Cheapest(memory_limit_mib=limit)).seconds for limit in (0.27, 0.35, 0.5)]
    assert times == sorted(times, reverse=True)


def test_fsdp_keeps_a_shard_of_what_it_would_hold() -> None:
    spec = MODELS["gpt"]
    alone = _plan(spec, Megatron())
    sharded = _plan(spec, Megatron(), parameter_shards=2)
    cut = sum(each.option.fsdp_bytes for each in sharded.modules) // 3  # gathered twice, and scattered once
    assert cut > 0
    assert alone.memory_bytes - sharded.memory_bytes >= 2 * cut // 2


def test_fsdp_communicates_what_is_left_whole() -> None:
    """Few tokens and many parameters: what replication saves on the axis, FSDP would pay several times."""
    spec = MODELS["llama"]
    chosen, reference = (
        _plan(spec, strategy, tokens=(1, 4), parameter_shards=2) for strategy in (Cheapest(), Megatron())
    )
    assert _communicated_bytes(chosen) <= _communicated_bytes(reference)
    assert any("S" in name for name in chosen.as_json()["candidates"].values())


def _communicated_bytes(plan: ShardPlan) -> int:
    """Return the payload of all collectives, FSDP's among them."""
    options = [each.option for each in plan.modules] + [each.option for each in plan.parameters]
    return sum(option.communicated_bytes for option in options)


def test_dropout_keeps_the_local_shapes_of_megatron() -> None:
    """Dropout of hidden units draws as many numbers as a rank has units."""
    names = Cheapest().plan(meta(Chain, dropout=0.1), SAMPLE, AXIS).as_json()["candidates"]
    assert names["blocks.0.up"] == "RS0 = RR x RS0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"memory_limit_mib": 0.0},
            "shard.memory_limit_mib: must be above 0 and finite, got 0.0",
            id="memory",
        ),
        pytest.param(
            {"flops_per_s": 0.0}, "shard.flops_per_s: must be positive and finite, got 0.0", id="rate"
        ),
        pytest.param(
            {"memory_limit_mib": float("inf")},
            "shard.memory_limit_mib: must be above 0 and finite, got inf",
            id="memory without end",
        ),
        pytest.param(
            {"latency_s": -1.0}, "shard.latency_s: must be at least 0 and finite, got -1.0", id="latency"
        ),
    ],
)
def test_refuses_values_out_of_range(fields: dict[str, float], message: str) -> None:
    with pytest.raises(StrategyError) as refusal:
        Cheapest(**fields)  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_refuses_a_limit_that_no_plan_meets() -> None:
    with pytest.raises(StrategyError) as refusal:
        _plan(MODELS["gpt"], Cheapest(memory_limit_mib=0.25))
    assert (
        str(refusal.value) == "shard.memory_limit_mib: no plan fits 0.25 MiB a rank; the smallest takes 0.267"
    )


def test_an_odd_batch_is_not_cut() -> None:
    plan = _plan(replace(MODELS["mlp"]), Cheapest(**_SLOW), tokens=(3, 5))  # type: ignore[arg-type]
    assert not any("_0" in name or "_1" in name for name in plan.as_json()["candidates"].values())
