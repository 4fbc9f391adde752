"""Execution: every candidate on four ranks computes what the dense operator does, with what it promised."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.shard.candidates.derivation import derive
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.matrix_products import linear
from tests.counted_collectives import promised
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import Examined, apply_elsewhere, examine

CASES: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], bool, int]] = {
    "ColossalAI's, all 36": ((4, 4, 4, 16), 32, (2, 2), True, 36),
    "without a bias": ((4, 4, 4, 16), 32, (2, 2), False, 36),
    "one batch dimension": ((8, 16), 32, (2, 2), True, 16),
    "no batch dimension": ((16,), 32, (2, 2), True, 9),
    "one axis": ((4, 4, 16), 32, (4,), True, 5),
    "three axes, one of one rank": ((4, 4, 16), 32, (2, 1, 2), True, 25),
    "indivisible": ((3, 5, 16), 7, (2, 2), True, 4),
}


@cache  # two tests look at one run
def _examined(pool4: RankPool, name: str) -> tuple[tuple[ShardingCandidate, ...], list[list[Examined]]]:
    input_shape, out_features, mesh_shape, bias, _ = CASES[name]
    found = candidates(
        linear(input_shape, out_features, bias=bias).typed(torch.float64), mesh_shape, "complete"
    )
    return found, pool4.run(examine, found, mesh_shape)


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_equals_the_dense_operator(pool4: RankPool, name: str) -> None:
    candidates, ranks = _examined(pool4, name)
    assert len(candidates) == CASES[name][-1]
    for found in ranks:
        assert [differences for differences, _ in found] == [()] * len(candidates)


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_communicates_what_it_promises(pool4: RankPool, name: str) -> None:
    candidates, ranks = _examined(pool4, name)
    for found in ranks:
        for candidate, (_, measured) in zip(candidates, found, strict=True):
            assert measured == promised(candidate.communication), candidate.name


def test_an_output_wanted_elsewhere_is_scattered(pool4: RankPool) -> None:
    found = candidates(linear((4, 4, 16), 32).typed(torch.float64), (2, 2), "complete")
    row_parallel = next(each for each in found if each.name == "RR = RS0 x S0R")
    scattered = [
        derive(row_parallel.operation, row_parallel.choices, (2, 2), name="scattered", output=output)
        for output in ((Shard(0), Replicate()), (Shard(2), Shard(1)), (Shard(1), Shard(1)))
    ]
    right = [((), promised(candidate.communication)) for candidate in scattered]
    assert pool4.run(examine, scattered, (2, 2)) == [right] * 4


REFUSED: dict[str, tuple[tuple[int, ...], str, str]] = {
    "another mesh": ((4,), "mesh", "mesh: must have shape (2, 2), got (4,)"),
    "an operand of another shape": ((2, 2), "shape", "operands.bias: must have shape (32,), got (1,)"),
    "missing operands": ((2, 2), "names", "operands: must be ['bias', 'input', 'weight'], got ['input']"),
    "an operand placed otherwise": (
        (2, 2),
        "placement",
        "operands.weight: must be placed as (Replicate(), Shard(dim=0)), got (Replicate(), Replicate())",
    ),
}


@pytest.mark.parametrize(("mesh_shape", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(pool4: RankPool, mesh_shape: tuple[int, ...], kind: str, message: str) -> None:
    candidate = next(
        each for each in candidates(linear((4, 16), 32), (2, 2)) if each.name == "RS1 = RR x RS1"
    )
    assert pool4.run(apply_elsewhere, candidate, mesh_shape, kind) == [message] * 4
