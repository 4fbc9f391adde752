"""Parity of every variant on two gloo ranks: before sharding, after it, in place, and at the call site."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategies.ac.offload import Offload
from tests.covering import matrix
from tests.rank_pool import RankPool
from tests.strategies.sharded_ranks import (
    cases,
    compare,
    first_call,
    offloaded_bytes,
    plan_of_one_rank,
    refusal,
    tape_of_a_collective,
    unit_inside,
)
from tests.strategies.toys import toy, train_step


@pytest.mark.parametrize(("mesh", "order", "variant"), matrix(list(cases())))
def test_parity_bit_for_bit_on_every_rank(pool2: RankPool, mesh: str, order: str, variant: str) -> None:
    assert pool2.run(compare, mesh, order, variant) == [[], []]


@pytest.mark.parametrize(
    "mesh", ["ddp", "fsdp2", "fsdp2_no_reshard", "fsdp1", "fsdp1_flat", "fsdp1_no_shard"]
)
@pytest.mark.parametrize("order", ["inside", "outside", "in_place"])
def test_gathered_weights_are_not_moved(pool2: RankPool, mesh: str, order: str) -> None:
    strategy = Offload(layers_fqn="layers")
    model = strategy.apply(toy())
    train_step(model)
    expected = strategy.observe(model).offloaded_bytes
    assert pool2.run(offloaded_bytes, mesh, order) == [expected, expected]


def test_reentrant_inside_a_sharded_fsdp1_unit_is_refused(pool2: RankPool) -> None:
    assert (
        pool2.run(refusal)
        == [
            (
                "ac.use_reentrant: 'layers.0' lies inside the sharded FSDP1 unit 'layers.0', whose weights "
                "are freed before recomputation; use ac.use_reentrant=false or wrap_order=outside_fsdp"
            )
        ]
        * 2
    )


_TENSOR_PARALLEL = (
    "ac: 'layers.0.up.weight' is a DTensor of tensor parallelism, and the first call plans for whole "
    "tensors; write a plan of a step by Budget.write_plan and give it as ac.plan_file, as trials do"
)


@pytest.mark.parametrize(("mesh", "message"), [("tp", _TENSOR_PARALLEL), ("fsdp2", "")])
def test_a_budget_plans_at_the_first_call_of_whole_tensors_alone(
    pool2: RankPool, mesh: str, message: str
) -> None:
    assert pool2.run(first_call, mesh) == [message, message]


def test_a_kept_result_of_a_collective_is_settled(pool2: RankPool) -> None:
    assert pool2.run(tape_of_a_collective) == [True, True]


@pytest.mark.parametrize(
    ("variant", "runs_again"),
    [
        ("modules", True),
        ("modules and results", True),
        ("budget", False),  # backward asks for what the unit gave before it has its weights
        ("budget of one rank", True),
        ("budget of a product", True),
    ],
)
def test_operators_run_again_with_the_weights_of_a_unit_inside_a_block(
    pool2: RankPool, tmp_path: Path, variant: str, runs_again: bool
) -> None:
    plan = plan_of_one_rank(variant, tmp_path) if variant.startswith("budget of") else ""
    assert pool2.run(unit_inside, variant, plan) == [([], runs_again)] * 2
