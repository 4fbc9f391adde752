"""linear: ColossalAI's set by name, the complete one by number, and operands as its test asserts them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from strategies import StrategyError
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.matrix_products import linear
from strategies.shard.operators.module_operations import linear_operation, module_operation
from tests.rank_pool import RankPool
from tests.strategies.shard.shard_ranks import placements_of_dtensor

SEED = (4, 4, 4, 16)
SEED_NAMES = {
    *(f"S0S1 = S0R x RS1_{i}" for i in range(3)),
    *(f"S1S0 = S1R x RS0_{i}" for i in range(3)),
    *(f"S0R = S0S1 x S1R_{i}" for i in range(3)),
    *(f"S1R = S1S0 x S0R_{i}" for i in range(3)),
    *(f"S01R = S01R x RR_{i}" for i in range(3)),
    "RS0 = RS1 x S1S0",
    "RS1 = RS0 x S0S1",
    "RR = RS0 x S0R",
    "RR = RS1 x S1R",
    "RS0 = RR x RS0",
    "RS1 = RR x RS1",
    "RR = RS01 x S01R",
    "RS01 = RR x RS01",
    "RR = RR x RR",
}
MISSED_NAMES = {
    *(f"S{axis}R = S{axis}R x RR_{i}" for axis in range(2) for i in range(3)),
    *(f"S01R = S01R x RR_{i}_{j}" for i in range(3) for j in range(3) if i != j),
}
MODULE = nn.Linear(16, 32, device="meta")
PLAIN_MODULE = nn.Linear(16, 32, bias=False, device="meta")
INPUT = torch.empty(SEED, device="meta")
SOURCES: dict[str, Callable[[Any], tuple[ShardingCandidate, ...]]] = {
    "shapes": lambda mode: candidates(linear(SEED, 32), (2, 2), mode),
    "shapes without a bias": lambda mode: candidates(linear(SEED, 32, bias=False), (2, 2), mode),
    "nn.Linear": lambda mode: candidates(module_operation(MODULE, SEED), (2, 2), mode),
    "nn.Linear without a bias": lambda mode: candidates(module_operation(PLAIN_MODULE, SEED), (2, 2), mode),
    "F.linear": lambda mode: candidates(
        linear_operation(INPUT.shape, MODULE.weight, MODULE.bias), (2, 2), mode
    ),
    "F.linear without a bias": lambda mode: candidates(
        linear_operation(INPUT.shape, MODULE.weight), (2, 2), mode
    ),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_classic_is_the_set_of_the_seed(source: Callable[[Any], tuple[ShardingCandidate, ...]]) -> None:
    names = [candidate.name for candidate in source("classic")]
    assert len(names) == 24
    assert set(names) == SEED_NAMES


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_complete_adds_the_twelve_that_the_peer_misses(
    source: Callable[[Any], tuple[ShardingCandidate, ...]],
) -> None:
    names = [candidate.name for candidate in source("complete")]
    assert len(names) == 36
    assert set(names) == SEED_NAMES | MISSED_NAMES


COUNTS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], int, int]] = {
    "no batch dimension": ((16,), 32, (2, 2), 9, 9),
    "one": ((4, 16), 32, (2, 2), 14, 16),
    "two": ((4, 4, 16), 32, (2, 2), 19, 25),
    "three": (SEED, 32, (2, 2), 24, 36),
    "four": ((4, 4, 4, 4, 16), 32, (2, 2), 29, 49),
    "the other input of ColossalAI's test, a batch dimension of one": ((1, 4, 4, 16), 32, (2, 2), 19, 25),
    "a batch dimension that two axes cut once": ((2, 4, 4, 16), 32, (2, 2), 23, 35),
    "an odd batch dimension": ((3, 4, 16), 32, (2, 2), 14, 16),
    "an odd output dimension": ((4, 4, 4, 16), 33, (2, 2), 13, 25),
    "an odd contracted dimension": ((4, 4, 4, 15), 32, (2, 2), 13, 25),
    "nothing but replication": ((3, 5), 7, (2, 2), 1, 1),
    "nothing but replication, on three axes": ((1,), 1, (2, 2, 2), 1, 1),
    "one axis": (SEED, 32, (4,), 6, 6),
    "an axis of one rank, left": (SEED, 32, (1, 4), 6, 6),
    "an axis of one rank, right": (SEED, 32, (4, 1), 6, 6),
    "one rank": (SEED, 32, (1,), 1, 1),
    "unequal axes": ((8, 16), 32, (2, 4), 14, 16),
    "three axes": ((8, 16), 32, (2, 2, 2), 58, 64),
    "three axes, one of one rank": (SEED, 32, (2, 1, 2), 24, 36),
}


@pytest.mark.parametrize(
    ("input_shape", "out_features", "mesh_shape", "classic", "complete"), COUNTS.values(), ids=COUNTS
)
def test_counts(
    input_shape: tuple[int, ...], out_features: int, mesh_shape: tuple[int, ...], classic: int, complete: int
) -> None:
    few = candidates(linear(input_shape, out_features), mesh_shape, "classic")
    all_ = candidates(linear(input_shape, out_features), mesh_shape, "complete")
    assert (len(few), len(all_)) == (classic, complete)
    assert {candidate.name for candidate in few} <= {candidate.name for candidate in all_}
    for found in (few, all_):
        assert len({candidate.name for candidate in found}) == len(found)
        assert len({tuple(each.placements for each in candidate.operands) for candidate in found}) == len(
            found
        )


def test_the_index_of_the_batch_dimension_stands_also_where_there_is_one() -> None:
    names = {candidate.name for candidate in candidates(linear((4, 8), 16), (2, 2))}
    assert names == {name for name in SEED_NAMES if not name.endswith(("_1", "_2"))}


@given(
    input_shape=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    out_features=st.integers(1, 8),
    mesh_shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_every_choice_that_divides_is_there_once(
    input_shape: list[int], out_features: int, mesh_shape: list[int]
) -> None:
    found = candidates(linear(input_shape, out_features), mesh_shape, "complete")
    sizes = (*input_shape, out_features)
    expected = _dividing(sizes, tuple(mesh_shape))
    assert len({candidate.choices for candidate in found}) == len(found) == expected >= 1
    for candidate in found:
        for operand in candidate.operands:
            assert prod(operand.local_shape) * 4 == operand.local_bytes


def _dividing(sizes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> int:
    """Count choice vectors axis by axis: replicate, or divide one of the sizes that are left."""
    if not mesh_shape:
        return 1
    ranks, rest = mesh_shape[0], mesh_shape[1:]
    count = _dividing(sizes, rest)
    for index, size in enumerate(sizes):
        if ranks > 1 and size % ranks == 0:
            count += _dividing((*sizes[:index], size // ranks, *sizes[index + 1 :]), rest)
    return count


OPERANDS: dict[str, tuple[str, str, tuple[int, ...], tuple[int, ...]]] = {
    "input": ("nn.Linear", "arg", SEED, (64, 16)),
    "weight": ("nn.Linear", "param", (32, 16), (16, 32)),
    "bias": ("nn.Linear", "param", (32,), (32,)),
    "output": ("nn.Linear", "output", (4, 4, 4, 32), (64, 32)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operand_data(name: str) -> None:
    source, type_, shape, logical_shape = OPERANDS[name]
    for candidate in SOURCES[source]("complete"):
        operand = candidate.operand(name)
        assert (operand.type, operand.shape, operand.logical_shape) == (type_, shape, logical_shape)


def test_tensors_that_are_no_parameters_are_arguments() -> None:
    weight, bias = torch.empty(32, 16, device="meta"), torch.empty(32, device="meta")
    candidate = candidates(linear_operation(INPUT.shape, weight, bias), (2, 2))[0]
    assert [operand.type for operand in candidate.operands] == ["arg", "arg", "arg", "output"]


@pytest.mark.parametrize("mode", ["classic", "complete"])
def test_sharding_matches_across_operands(mode: Any) -> None:
    for candidate in candidates(linear(SEED, 32), (2, 2), mode):
        sequences = {operand.name: operand.sharding_sequence for operand in candidate.operands}
        assert sequences["input"][:-1] == sequences["output"][:-1]
        assert sequences["weight"][1] == sequences["input"][-1]
        assert sequences["weight"][0] == sequences["output"][-1]
        assert sequences["bias"][-1] == sequences["output"][-1]


SPECS: dict[str, tuple[str, str, str, str]] = {
    "S0S1 = S0R x RS1_1": ("RS0RR", "S1R", "S1", "RS0RS1"),
    "S1R = S1S0 x S0R_2": ("RRS1S0", "RS0", "R", "RRS1R"),
    "RS01 = RR x RS01": ("RRRR", "S01R", "S01", "RRRS01"),
    "S01R = S01R x RR_0": ("S01RRR", "RR", "R", "S01RRR"),
    "S01R = S01R x RR_2_0": ("S1RS0R", "RR", "R", "S1RS0R"),
    "S1R = S1R x RR_1": ("RS1RR", "RR", "R", "RS1RR"),
}


@pytest.mark.parametrize(("name", "specs"), SPECS.items(), ids=SPECS)
def test_specs(name: str, specs: tuple[str, ...]) -> None:
    found = {candidate.name: candidate for candidate in candidates(linear(SEED, 32), (2, 2), "complete")}
    assert tuple(operand.spec for operand in found[name].operands) == specs


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown mode": (
        lambda: candidates(linear(SEED, 32), (2, 2), "all"),  # type: ignore[arg-type]
        "mode: must be classic or complete, got 'all'",
    ),
    "an input without dimensions": (
        lambda: candidates(linear((), 32), (2, 2)),
        "input_shape: must hold sizes of at least 1, got ()",
    ),
    "an empty input": (
        lambda: candidates(linear((4, 0), 32), (2, 2)),
        "input_shape: must hold sizes of at least 1, got (4, 0)",
    ),
    "no output features": (
        lambda: candidates(linear(SEED, 0), (2, 2)),
        "out_features: must hold sizes of at least 1, got (0,)",
    ),
    "a mesh without axes": (
        lambda: candidates(linear(SEED, 32), ()),
        "mesh_shape: must hold sizes of at least 1, got ()",
    ),
    "a fraction of a rank": (
        lambda: candidates(linear(SEED, 32), (2, 0.5)),  # type: ignore[arg-type]
        "mesh_shape: must hold sizes of at least 1, got (2, 0.5)",
    ),
    "a module of other features": (
        lambda: candidates(module_operation(MODULE, (4, 8)), (2, 2)),
        "input_shape: must end in the columns of weight (32, 16), got (4, 8)",
    ),
    "a function whose shapes do not multiply": (
        lambda: candidates(linear_operation(INPUT.shape, torch.empty(16, 32)), (2, 2)),
        "input_shape: must end in the columns of weight (16, 32), got (4, 4, 4, 16)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        call()
    assert str(error.value) == message


def test_a_matrix_product_has_the_sixteen_candidates_of_dtensor(pool4: RankPool) -> None:
    """DTensor's rule for aten.mm takes the transposed weight, and leaves the output as it is computed."""
    theirs = pool4.run(placements_of_dtensor, "mk,kn->mn")[0]
    ours = {
        (
            candidate.operand("input").placements,
            tuple(_transposed(each) for each in candidate.operand("weight").placements),
            candidate.output.computed,
        )
        for candidate in candidates(linear((8, 16), 32, bias=False), (2, 2), "complete")
    }
    assert len(theirs) == 16
    assert set(theirs) == ours


def _transposed(placement: Any) -> Any:
    return type(placement)(1 - placement.dim) if placement.is_shard() else placement
