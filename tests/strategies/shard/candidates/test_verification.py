"""The check of candidates finds planted errors; what nothing is wrong with is in test_execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.convolution_and_embedding import embedding
from strategies.shard.operators.matrix_products import linear
from strategies.shard.operators.norms import batch_norm
from tests.counted_collectives import promised
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import (
    bias_added_by_every_rank,
    examine,
    no_weight_gradient,
    own_statistics,
    rows_of_the_first_rank,
    weight_gradient_slightly_off,
)

COMPLETE = {
    candidate.name: candidate
    for candidate in candidates(linear((4, 4, 4, 16), 32).typed(torch.float64), (2, 2), "complete")
}
ROWS, COLUMNS, CONTRACTED = (
    COMPLETE[name] for name in ("S0R = S0R x RR_0", "S0S1 = S0R x RS1_0", "RR = RS0 x S0R")
)


def _with(candidate: ShardingCandidate, name: str, **fields: Any) -> ShardingCandidate:
    operands = tuple(
        replace(operand, **fields) if operand.name == name else operand for operand in candidate.operands
    )
    return replace(candidate, operands=operands)


def _computing(candidate: ShardingCandidate, compute: Callable[..., torch.Tensor]) -> ShardingCandidate:
    return replace(candidate, operation=replace(candidate.operation, compute=compute))


VOCABULARY = next(
    each
    for each in candidates(embedding((16,), 8, 4).typed(torch.float64), (2, 2), "complete")
    if each.choices == ("v", None)
)
SYNCHRONISED = next(
    each for each in candidates(batch_norm((4, 3)).typed(torch.float64), (2, 2)) if "batch" in each.choices
)


PLANTED: dict[str, tuple[ShardingCandidate, set[str]]] = {
    "the output is not reduced": (
        _with(CONTRACTED, "output", computed=CONTRACTED.output.placements),
        {"output"},
    ),
    "the gradient of the weight is not reduced": (
        _with(ROWS, "weight", computed=ROWS.operand("weight").placements),
        {"gradient of weight"},
    ),
    "the gradient of the bias is not reduced": (
        _with(ROWS, "bias", computed=ROWS.operand("bias").placements),
        {"gradient of bias"},
    ),
    "the gradient of the input is not reduced": (
        _with(COLUMNS, "input", computed=COLUMNS.operand("input").placements),
        {"gradient of input"},
    ),
    "a whole gradient is reduced": (
        _with(ROWS, "weight", computed=(Partial(), Partial())),
        {"gradient of weight"},
    ),
    "the weight lies across the wrong axis": (
        _with(
            COLUMNS,
            "weight",
            placements=COLUMNS.operand("weight").placements[::-1],
            computed=(*COLUMNS.operand("weight").computed[::-1],),
        ),
        {"output", "gradient of input", "gradient of weight"},
    ),
    "every rank adds the bias": (
        _computing(CONTRACTED, bias_added_by_every_rank),
        {"output"},
    ),
    "a rank looks up the rows of another": (
        _computing(VOCABULARY, rows_of_the_first_rank),
        {"output", "gradient of weight"},
    ),
    "statistics are those of a shard": (
        _computing(SYNCHRONISED, own_statistics),
        {"output", "gradient of input", "gradient of weight", "buffer running_mean", "buffer running_var"},
    ),
    "a gradient is off by one in 10^10": (
        _computing(ROWS, weight_gradient_slightly_off),
        {"gradient of weight"},
    ),
    "a gradient is missing": (
        _computing(ROWS, no_weight_gradient),
        {"gradient of weight"},
    ),
}


@pytest.mark.parametrize(("candidate", "wrong"), PLANTED.values(), ids=PLANTED)
def test_planted_errors_are_found(pool4: RankPool, candidate: ShardingCandidate, wrong: set[str]) -> None:
    ranks = pool4.run(examine, [candidate], (2, 2))
    assert {difference.what for ((found, _),) in ranks for difference in found} == wrong


PROBLEMS: dict[str, str] = {
    "a gradient is missing": "is missing",
    "a gradient is off by one in 10^10": "is 1.0e-10 off, more than 1e-12",
}


@pytest.mark.parametrize(("planted", "problem"), PROBLEMS.items(), ids=PROBLEMS)
def test_a_problem_is_told_in_words(pool4: RankPool, planted: str, problem: str) -> None:
    ((found, _),) = pool4.run(examine, [PLANTED[planted][0]], (2, 2))[0]
    assert [difference.problem for difference in found] == [problem]


def test_a_reduction_that_is_left_out_is_also_missed_among_the_collectives(pool4: RankPool) -> None:
    candidate = PLANTED["the output is not reduced"][0]
    ((_, measured),) = pool4.run(examine, [candidate], (2, 2))[0]
    assert promised(CONTRACTED.communication) - measured == {("forward", "all_reduce", 16384): 1}


def test_nothing_is_wrong_with_replication(pool4: RankPool) -> None:
    assert COMPLETE["RR = RR x RR"].operand("weight").placements == (Replicate(), Replicate())
    assert pool4.run(examine, [COMPLETE["RR = RR x RR"]], (2, 2)) == [[((), {})]] * 4
