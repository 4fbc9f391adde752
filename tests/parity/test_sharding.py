"""Sharding: a model placed otherwise computes the same, within rounding; under AC it is the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest

from harness.experiment.experiment import Experiment
from tests.covering import marked
from tests.parity import cases, planted
from tests.rank_pool import RankPool

_SLOW_LINKS = {"latency_s": 0.0, "bandwidth_bytes_per_s": 3e9, "flops_per_s": 1e9}
"""Hardware on which sharding the small models of these tests pays."""
_BATCH = {"candidate": "S0R = S0R x RR_0"}
_SHARDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron": ("megatron", {}),
    "output features of every linear": ("candidate", {}),
    "input features": ("candidate", {"candidate": "RR = RS0 x S0R", "modules": "*d*"}),
    "batch": ("candidate", _BATCH),
    "sequence": ("candidate", {"candidate": "S0R = S0R x RR_1"}),
    "cheapest, which replicates everything": ("cheapest", {}),
    "cheapest, which mixes features and batch": ("cheapest", _SLOW_LINKS),
    "cheapest within little memory": ("cheapest", {"memory_limit_mib": 0.36}),
}
_NEUTRAL = [
    *product(_SHARDINGS, ["gpt", "llama"], ["tp2"]),
    *product(_SHARDINGS, ["llama"], ["shard2_tp2"]),
]
_BY_DEFAULT = [
    *product(_SHARDINGS, ["gpt"], ["tp2"]),
    ("output features of every linear", "llama", "tp2"),
    ("cheapest, which mixes features and batch", "llama", "shard2_tp2"),
]
"""A plan knows one mesh dimension: that FSDP comes around it needs no plan of every kind."""
_COMMUNICATING: dict[str, dict[str, Any]] = {"megatron": {}, "candidate": _BATCH}
_STEPS = 2
"""The second begins with what the first leaves; links to the plain model have as many."""
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "matmuls and collectives saved": ("selective_op", {"save_ops": ("matmul", "comm")}),
    "offload": ("offload", {}),
    "nested": ("nested", {"levels": (2,)}),
}
_UNDER_AC: dict[str, dict[str, Any]] = {"candidate": _BATCH, "cheapest": _SLOW_LINKS}


def _case(**fields: Any) -> Experiment:
    return cases.experiment(**{"parity_steps": _STEPS, **fields})


@pytest.mark.parametrize(("sharding", "model", "mesh"), marked(_NEUTRAL, _BY_DEFAULT))
def test_is_neutral_within_tolerance(
    unequal_ranks: Callable[[Experiment], dict[int, list[str]]], sharding: str, model: str, mesh: str
) -> None:
    shard, options = _SHARDINGS[sharding]
    case = _case(model=model, mesh=cases.MESHES[mesh], variant="none", shard=shard, sharding=options)
    assert unequal_ranks(case) == {}


@pytest.mark.parametrize(
    ("dtype", "shard"),
    [("bf16", "cheapest"), ("bf16", "candidate"), ("bf16_mixed", "megatron"), ("bf16_mixed", "cheapest")],
)
def test_is_neutral_within_a_wider_tolerance_in_half_precision(
    pool2: RankPool, dtype: str, shard: str
) -> None:
    case = _case(mesh=cases.MESHES["tp2"], variant="none", shard=shard, dtype=dtype)
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize("model", ["gpt", "mlp"])
@pytest.mark.parametrize("shard", ["megatron", "cheapest"])
def test_random_numbers_are_those_of_the_twin(pool2: RankPool, model: str, shard: str) -> None:
    case = _case(model=model, mesh=cases.MESHES["tp2"], variant="none", shard=shard, dropout=0.1)
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize(
    ("variant", "shard"),
    marked([*product(_VARIANTS, _UNDER_AC)], [*zip(_VARIANTS, cycle(_UNDER_AC), strict=False)]),
)
def test_checkpointing_of_a_sharded_model_is_bitwise_neutral(
    pool2: RankPool, variant: str, shard: str
) -> None:
    name, options = _VARIANTS[variant]
    sharding = _UNDER_AC[shard]
    case = _case(mesh=cases.MESHES["tp2"], variant=name, options=options, shard=shard, sharding=sharding)
    assert case.tolerance is None
    assert pool2.run(cases.prove, case) == [[], []]


@pytest.mark.parametrize(
    "wrap_order", [pytest.param("inside_fsdp", marks=pytest.mark.matrix), "outside_fsdp", "call_site"]
)
def test_checkpointing_is_bitwise_neutral_in_every_order(pool4: RankPool, wrap_order: str) -> None:
    case = _case(mesh=cases.MESHES["shard2_tp2"], shard="candidate", sharding=_BATCH, wrap_order=wrap_order)
    assert pool4.run(cases.prove, case) == [[], [], [], []]


_AGAINST_THE_PLAIN_MODEL = "ac=none chunk=none shard=planted against ac=none chunk=none shard=none in fp32"


def test_a_planted_error_is_found(pool2: RankPool) -> None:
    case = _case(mesh=cases.MESHES["tp2"], variant="none", parity_steps=1)
    for found in pool2.run(cases.parity, replace(case, shard=planted.Planted(error=planted.ERRORS[0]))):
        step, dense = found.chain
        assert not step.is_equal
        assert str(step.compared) == _AGAINST_THE_PLAIN_MODEL
        assert dense.is_equal  # the error is the variant's


_FIRST, *_OTHERS = planted.ERRORS


@pytest.mark.parametrize(
    ("error", "dtype"),
    marked(  # whatever a model computes in, the link that finds the error is one of fp32
        [*product(planted.ERRORS, ["bf16", "fp32", "bf16_mixed"])],
        [*product([_FIRST], ["fp32", "bf16_mixed"]), *product(_OTHERS, ["bf16"])],
    ),
)
def test_a_planted_error_is_found_in_every_precision_and_not_hidden_by_checkpointing(
    pool2: RankPool, error: str, dtype: str
) -> None:
    case = _case(mesh=cases.MESHES["tp2"], dtype=dtype, parity_steps=1)
    for found in pool2.run(cases.parity, replace(case, shard=planted.Planted(error=error))):
        assert (found.gradients.equal, found.gradients.max_abs) == (True, 0.0)
        last = found.chain[-2]
        assert str(last.compared) == _AGAINST_THE_PLAIN_MODEL
        assert not last.is_equal
        assert not found.is_equal


@pytest.mark.parametrize(("variant", "count"), [("none", 2), ("full", 3)])
def test_without_an_error_nothing_is_found(pool2: RankPool, variant: str, count: int) -> None:
    case = _case(mesh=cases.MESHES["tp2"], variant=variant, dtype="bf16", parity_steps=1)
    for found in pool2.run(cases.parity, replace(case, shard=planted.Planted())):
        assert (found.is_equal, found.level, len(found.chain)) == (True, "tolerance", count)


@pytest.mark.parametrize(
    ("shard", "dtype"),
    marked(
        [*product(_COMMUNICATING, ["fp32", "bf16", "bf16_mixed"])],
        [("megatron", "bf16"), ("candidate", "fp32"), ("candidate", "bf16_mixed")],
    ),
)
def test_a_step_communicates_in_its_precision_what_the_plan_promises(
    pool2: RankPool, pool4: RankPool, shard: str, dtype: str
) -> None:
    sharding = _COMMUNICATING[shard]
    for pool, mesh in ((pool2, "tp2"), (pool4, "shard2_tp2")):
        case = _case(mesh=cases.MESHES[mesh], variant="none", shard=shard, sharding=sharding, dtype=dtype)
        for expected, measured in pool.run(cases.all_reduces, case):
            assert expected
            assert measured == expected


def test_another_case_on_a_mesh_makes_no_threads(pool2: RankPool) -> None:
    counts = []
    for learning_rate in (0.1, 0.2):
        case = _case(mesh=cases.MESHES["tp2"], variant="none", parity_steps=1, learning_rate=learning_rate)
        pool2.run(cases.prove, case)
        counts.append(pool2.run(cases.threads_of))
    assert counts[0] == counts[1]
