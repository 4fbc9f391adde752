"""Following operators: which dimensions they carry on, and what is no such operator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import StrategyError
from strategies.shard.candidates.enumeration import candidates
from strategies.shard.candidates.execution import rank_parts
from strategies.shard.candidates.layout import local_part
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from strategies.shard.operators.pointwise import elementwise, softmax, sum_
from strategies.shard.operators.views import getitem, permute, split, transpose, view

ADD = torch.add
# on one axis of two ranks: the first is replication
NAMES: dict[str, tuple[tuple[ShardingCandidate, ...], list[str]]] = {
    "view as it is": (candidates(view((4, 8), (4, 8)), (2,)), ["RR = RR", "S0R = S0R", "RS0 = RS0"]),
    "view that flattens carries on the leading dimension": (
        candidates(view((4, 8), (32,)), (2,)),
        ["R = RR", "S0 = S0R"],
    ),
    "view that splits carries on the leading dimension": (
        candidates(view((32,), (4, 8)), (2,)),
        ["RR = R", "S0R = S0"],
    ),
    "view whose leading sizes share a divisor": (
        candidates(view((6, 4), (4, 6)), (2,)),
        ["RR = RR", "S0R = S0R"],
    ),
    "view whose leading sizes share none": (candidates(view((3, 4), (4, 3)), (2,)), ["RR = RR"]),
    "view looks through dimensions of one": (
        candidates(view((1, 4, 1, 8), (4, 1, 1, 8, 1)), (2,)),
        ["RRRRR = RRRR", "S0RRRR = RS0RR", "RRRS0R = RRRS0"],
    ),
    "view of two groups": (
        candidates(view((4, 8, 6), (32, 2, 3)), (2,)),
        ["RRR = RRR", "S0RR = S0RR", "RS0R = RRS0"],
    ),
    "view of one element": (candidates(view((1, 1), (1,)), (2,)), ["R = RR"]),
    "permute": (
        candidates(permute((4, 2, 8), (1, 2, 0)), (2,)),
        ["RRR = RRR", "RRS0 = S0RR", "S0RR = RS0R", "RS0R = RRS0"],
    ),
    "transpose": (candidates(transpose((4, 3), 0, 1), (2,)), ["RR = RR", "RS0 = S0R"]),
    "split keeps the split dimension whole": (
        candidates(split((4, 8), 2, dim=1), (2,)),
        ["RR = RR", "S0R = S0R"],
    ),
    "softmax keeps its dimension whole": (candidates(softmax((4, 8), -1), (2,)), ["RR = RR", "S0R = S0R"]),
    "sum": (candidates(sum_((4, 8), (0,)), (2,)), ["R = RR", "R = S0R", "S0 = RS0"]),
    "sum that keeps its dimension": (
        candidates(sum_((4, 8), (0,), keepdim=True), (2,)),
        ["RR = RR", "RR = S0R", "RS0 = RS0"],
    ),
    "getitem of a number": (candidates(getitem((4, 8), 0), (2,)), ["R = RR", "S0 = RS0"]),
    "getitem of a part": (candidates(getitem((4, 8), slice(2)), (2,)), ["RR = RR", "RS0 = RS0"]),
    "getitem of everything": (
        candidates(getitem((4, 8), (slice(0, 9), slice(None))), (2,)),
        ["RR = RR", "S0R = S0R", "RS0 = RS0"],
    ),
    "getitem backwards has another order": (
        candidates(getitem((4, 8), (..., slice(0, 8, 2))), (2,)),
        ["RR = RR", "S0R = S0R"],
    ),
    "getitem that adds a dimension": (
        candidates(getitem((4, 8), (None, ..., 1)), (2,)),
        ["RR = RR", "RS0 = S0R"],
    ),
    "getitem of a single element": (candidates(getitem((4, 8), (0, 1)), (2,)), ["R = RR"]),
    "elementwise": (
        candidates(elementwise([(4, 1), (8,)], function=ADD), (2,)),
        ["RR = RR x R", "S0R = S0R x R", "RS0 = RR x S0"],
    ),
    "elementwise on axes of one rank": (candidates(elementwise([(4,)], function=ADD), (1, 1)), ["R = R"]),
    "elementwise on three axes": (
        candidates(elementwise([(4,)], function=ADD), (2, 1, 2)),
        ["R = R", "S2 = S2", "S0 = S0", "S02 = S02"],
    ),
}


@pytest.mark.parametrize(("found", "names"), NAMES.values(), ids=NAMES)
def test_names(found: tuple[ShardingCandidate, ...], names: list[str]) -> None:
    assert [candidate.name for candidate in found] == names


SHAPES: dict[str, tuple[ShardingCandidate, list[tuple[int, ...]]]] = {
    "view with a size that follows": (candidates(view((4, 8), (2, -1)), (2,))[0], [(2, 16)]),
    "split with a rest": (candidates(split((2, 7), 3, dim=-1), (2,))[0], [(2, 3), (2, 3), (2, 1)]),
    "sum of everything": (candidates(sum_((4, 8), (0, -1)), (2,))[0], [()]),
    "getitem": (candidates(getitem((4, 8), (None, slice(1, 4, 2))), (2,))[0], [(1, 2, 8)]),
    "elementwise": (candidates(elementwise([(4, 1), (2, 1, 8)], function=ADD), (2,))[0], [(2, 4, 8)]),
}


@pytest.mark.parametrize(("candidate", "shapes"), SHAPES.values(), ids=SHAPES)
def test_shapes_of_outputs(candidate: ShardingCandidate, shapes: list[tuple[int, ...]]) -> None:
    assert [output.shape for output in candidate.outputs] == shapes


def test_only_sums_and_broadcasts_communicate() -> None:
    summed = candidates(sum_((4, 8), (0,)), (2,))[1]
    added = candidates(elementwise([(4, 8), (8,)], function=ADD), (2,))[1]
    found = [
        [(each.phase, each.kind, each.operand, each.payload_bytes) for each in candidate.communication]
        for candidate in (summed, added)
    ]
    assert found == [
        [("forward", "all_reduce", "output", 32)],
        [("backward", "all_reduce", "input_1", 32)],
    ]
    quiet = (candidates(view((4, 8), (32,)), (2, 2)), candidates(split((4, 8), 2, dim=1), (2, 2)))
    assert {candidate.communication for found in quiet for candidate in found} == {()}


@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4),
    order=st.permutations([0, 1, 2, 3]),
    merged=st.integers(0, 3),
    mesh_shape=st.lists(st.integers(1, 3), min_size=1, max_size=2),
)
@settings(deadline=None, max_examples=60)
def test_a_view_of_a_part_is_the_part_of_the_view(
    shape: list[int], order: list[int], merged: int, mesh_shape: list[int]
) -> None:
    """Any other shape: the sizes in another order, the first few of them as one."""
    sizes = [shape[dim] for dim in order if dim < len(shape)]
    after = [prod(sizes[:merged]), *sizes[merged:]]
    whole = torch.arange(prod(shape)).view(shape)
    for candidate in candidates(view(shape, after), mesh_shape):
        (placed,), made = candidate.inputs, candidate.output
        for coordinate in product(*map(range, mesh_shape)):
            part = local_part(whole, placed.placements, candidate.mesh_shape, coordinate)
            local = LocalOperands(tensors={"input": part}, parts=rank_parts(candidate, coordinate))
            wanted = local_part(whole.view(after), made.placements, candidate.mesh_shape, coordinate)
            computed = candidate.operation.compute(local)
            assert isinstance(computed, torch.Tensor)
            assert torch.equal(computed, wanted)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a view of other elements": (
        lambda: candidates(view((4, 8), (5, -1)), (2,)),
        "shape: must have the elements of (4, 8), got (5, -1)",
    ),
    "a dimension twice": (
        lambda: candidates(permute((4, 8), (0, -2)), (2,)),
        "dims: must be an order of 2 dimensions, got (0, -2)",
    ),
    "a dimension too few": (
        lambda: candidates(permute((4, 8), (0,)), (2,)),
        "dims: must be an order of 2 dimensions, got (0,)",
    ),
    "a dimension that is none": (
        lambda: candidates(permute((4, 8), (0, 1, 5)), (2,)),
        "dims: must be an order of 2 dimensions, got (0, 1, 5)",
    ),
    "transpose of a dimension that is none": (
        lambda: candidates(transpose((4, 8), 0, 2), (2,)),
        "dim1: must be from -2 to 1, got 2",
    ),
    "pieces that are not all": (
        lambda: candidates(split((4, 8), (1, 2)), (2,)),
        "sizes: must sum to 4, got (1, 2)",
    ),
    "pieces of nothing": (
        lambda: candidates(split((4, 8), 0), (2,)),
        "sizes: must hold sizes of at least 1, got (0,)",
    ),
    "softmax along a dimension that is none": (
        lambda: candidates(softmax((4, 8), -3), (2,)),
        "dim: must be from -2 to 1, got -3",
    ),
    "a sum over nothing": (
        lambda: candidates(sum_((4, 8), ()), (2,)),
        "dims: must name dimensions once, at least one, got ()",
    ),
    "a sum over a dimension twice": (
        lambda: candidates(sum_((4, 8), (1, -1)), (2,)),
        "dims: must name dimensions once, at least one, got (1, -1)",
    ),
    "an index out of range": (
        lambda: candidates(getitem((4, 8), 4), (2,)),
        "index: must fit a tensor of (4, 8), got (4,)",
    ),
    "too many indices": (
        lambda: candidates(getitem((4,), (0, 0)), (2,)),
        "index: must fit a tensor of (4,), got (0, 0)",
    ),
    "a slice that runs backwards": (
        lambda: candidates(getitem((4, 8), slice(None, None, -1)), (2,)),
        "index: must fit a tensor of (4, 8), got (slice(None, None, -1),)",
    ),
    "an index that is a list": (
        lambda: candidates(getitem((4, 8), ([0, 1],)), (2,)),  # type: ignore[arg-type]
        "index: must hold integers, slices, None and an ellipsis, got [0, 1]",
    ),
    "an index that picks nothing": (
        lambda: candidates(getitem((4, 8), slice(2, 2)), (2,)),
        "index: must pick something from (4, 8), got (slice(2, 2, None),)",
    ),
    "no operand": (
        lambda: candidates(elementwise([], function=ADD), (2,)),
        "shapes: must be at least one, got none",
    ),
    "operands that do not broadcast": (
        lambda: candidates(elementwise([(4,), (3,)], function=ADD), (2,)),
        "shapes: must broadcast with each other, got (4,) and (3,)",
    ),
    "an operand without elements": (
        lambda: candidates(elementwise([(4,), (0,)], function=ADD), (2,)),
        "shapes[1]: must hold sizes of at least 1, got (0,)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        call()
    assert str(error.value) == message
