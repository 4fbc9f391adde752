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
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.execution import rank_parts
from strategies.shard.candidates.layout import local_part
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.operators import elementwise, getitem, permute, softmax, split, transpose, view
from strategies.shard.operators import sum as sum_

ADD = torch.add
# on one axis of two ranks: the first is replication
NAMES: dict[str, tuple[tuple[Candidate, ...], list[str]]] = {
    "view as it is": (view.candidates((4, 8), (4, 8), (2,)), ["RR = RR", "S0R = S0R", "RS0 = RS0"]),
    "view that flattens carries on the leading dimension": (
        view.candidates((4, 8), (32,), (2,)),
        ["R = RR", "S0 = S0R"],
    ),
    "view that splits carries on the leading dimension": (
        view.candidates((32,), (4, 8), (2,)),
        ["RR = R", "S0R = S0"],
    ),
    "view whose leading sizes share a divisor": (
        view.candidates((6, 4), (4, 6), (2,)),
        ["RR = RR", "S0R = S0R"],
    ),
    "view whose leading sizes share none": (view.candidates((3, 4), (4, 3), (2,)), ["RR = RR"]),
    "view looks through dimensions of one": (
        view.candidates((1, 4, 1, 8), (4, 1, 1, 8, 1), (2,)),
        ["RRRRR = RRRR", "S0RRRR = RS0RR", "RRRS0R = RRRS0"],
    ),
    "view of two groups": (
        view.candidates((4, 8, 6), (32, 2, 3), (2,)),
        ["RRR = RRR", "S0RR = S0RR", "RS0R = RRS0"],
    ),
    "view of one element": (view.candidates((1, 1), (1,), (2,)), ["R = RR"]),
    "permute": (
        permute.candidates((4, 2, 8), (1, 2, 0), (2,)),
        ["RRR = RRR", "RRS0 = S0RR", "S0RR = RS0R", "RS0R = RRS0"],
    ),
    "transpose": (transpose.candidates((4, 3), 0, 1, (2,)), ["RR = RR", "RS0 = S0R"]),
    "split keeps the split dimension whole": (
        split.candidates((4, 8), 2, (2,), dim=1),
        ["RR = RR", "S0R = S0R"],
    ),
    "softmax keeps its dimension whole": (softmax.candidates((4, 8), -1, (2,)), ["RR = RR", "S0R = S0R"]),
    "sum": (sum_.candidates((4, 8), (0,), (2,)), ["R = RR", "R = S0R", "S0 = RS0"]),
    "sum that keeps its dimension": (
        sum_.candidates((4, 8), (0,), (2,), keepdim=True),
        ["RR = RR", "RR = S0R", "RS0 = RS0"],
    ),
    "getitem of a number": (getitem.candidates((4, 8), 0, (2,)), ["R = RR", "S0 = RS0"]),
    "getitem of a part": (getitem.candidates((4, 8), slice(2), (2,)), ["RR = RR", "RS0 = RS0"]),
    "getitem of everything": (
        getitem.candidates((4, 8), (slice(0, 9), slice(None)), (2,)),
        ["RR = RR", "S0R = S0R", "RS0 = RS0"],
    ),
    "getitem backwards has another order": (
        getitem.candidates((4, 8), (..., slice(0, 8, 2)), (2,)),
        ["RR = RR", "S0R = S0R"],
    ),
    "getitem that adds a dimension": (
        getitem.candidates((4, 8), (None, ..., 1), (2,)),
        ["RR = RR", "RS0 = S0R"],
    ),
    "getitem of a single element": (getitem.candidates((4, 8), (0, 1), (2,)), ["R = RR"]),
    "elementwise": (
        elementwise.candidates([(4, 1), (8,)], (2,), function=ADD),
        ["RR = RR x R", "S0R = S0R x R", "RS0 = RR x S0"],
    ),
    "elementwise on axes of one rank": (elementwise.candidates([(4,)], (1, 1), function=ADD), ["R = R"]),
    "elementwise on three axes": (
        elementwise.candidates([(4,)], (2, 1, 2), function=ADD),
        ["R = R", "S2 = S2", "S0 = S0", "S02 = S02"],
    ),
}


@pytest.mark.parametrize(("found", "names"), NAMES.values(), ids=NAMES)
def test_names(found: tuple[Candidate, ...], names: list[str]) -> None:
    assert [candidate.name for candidate in found] == names


SHAPES: dict[str, tuple[Candidate, list[tuple[int, ...]]]] = {
    "view with a size that follows": (view.candidates((4, 8), (2, -1), (2,))[0], [(2, 16)]),
    "split with a rest": (split.candidates((2, 7), 3, (2,), dim=-1)[0], [(2, 3), (2, 3), (2, 1)]),
    "sum of everything": (sum_.candidates((4, 8), (0, -1), (2,))[0], [()]),
    "getitem": (getitem.candidates((4, 8), (None, slice(1, 4, 2)), (2,))[0], [(1, 2, 8)]),
    "elementwise": (elementwise.candidates([(4, 1), (2, 1, 8)], (2,), function=ADD)[0], [(2, 4, 8)]),
}


@pytest.mark.parametrize(("candidate", "shapes"), SHAPES.values(), ids=SHAPES)
def test_shapes_of_outputs(candidate: Candidate, shapes: list[tuple[int, ...]]) -> None:
    assert [output.shape for output in candidate.outputs] == shapes


def test_only_sums_and_broadcasts_communicate() -> None:
    summed = sum_.candidates((4, 8), (0,), (2,))[1]
    added = elementwise.candidates([(4, 8), (8,)], (2,), function=ADD)[1]
    found = [
        [(each.phase, each.kind, each.operand, each.payload_bytes) for each in candidate.communication]
        for candidate in (summed, added)
    ]
    assert found == [
        [("forward", "all_reduce", "output", 32)],
        [("backward", "all_reduce", "input_1", 32)],
    ]
    quiet = (view.candidates((4, 8), (32,), (2, 2)), split.candidates((4, 8), 2, (2, 2), dim=1))
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
    for candidate in view.candidates(shape, after, mesh_shape):
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
        lambda: view.candidates((4, 8), (5, -1), (2,)),
        "shape: must have the elements of (4, 8), got (5, -1)",
    ),
    "a dimension twice": (
        lambda: permute.candidates((4, 8), (0, -2), (2,)),
        "dims: must be an order of 2 dimensions, got (0, -2)",
    ),
    "a dimension too few": (
        lambda: permute.candidates((4, 8), (0,), (2,)),
        "dims: must be an order of 2 dimensions, got (0,)",
    ),
    "a dimension that is none": (
        lambda: permute.candidates((4, 8), (0, 1, 5), (2,)),
        "dims: must be an order of 2 dimensions, got (0, 1, 5)",
    ),
    "transpose of a dimension that is none": (
        lambda: transpose.candidates((4, 8), 0, 2, (2,)),
        "dim1: must be from -2 to 1, got 2",
    ),
    "pieces that are not all": (
        lambda: split.candidates((4, 8), (1, 2), (2,)),
        "sizes: must sum to 4, got (1, 2)",
    ),
    "pieces of nothing": (
        lambda: split.candidates((4, 8), 0, (2,)),
        "sizes: must hold sizes of at least 1, got (0,)",
    ),
    "softmax along a dimension that is none": (
        lambda: softmax.candidates((4, 8), -3, (2,)),
        "dim: must be from -2 to 1, got -3",
    ),
    "a sum over nothing": (
        lambda: sum_.candidates((4, 8), (), (2,)),
        "dims: must name dimensions once, at least one, got ()",
    ),
    "a sum over a dimension twice": (
        lambda: sum_.candidates((4, 8), (1, -1), (2,)),
        "dims: must name dimensions once, at least one, got (1, -1)",
    ),
    "an index out of range": (
        lambda: getitem.candidates((4, 8), 4, (2,)),
        "index: must fit a tensor of (4, 8), got (4,)",
    ),
    "too many indices": (
        lambda: getitem.candidates((4,), (0, 0), (2,)),
        "index: must fit a tensor of (4,), got (0, 0)",
    ),
    "a slice that runs backwards": (
        lambda: getitem.candidates((4, 8), slice(None, None, -1), (2,)),
        "index: must fit a tensor of (4, 8), got (slice(None, None, -1),)",
    ),
    "an index that is a list": (
        lambda: getitem.candidates((4, 8), ([0, 1],), (2,)),  # type: ignore[arg-type]
        "index: must hold integers, slices, None and an ellipsis, got [0, 1]",
    ),
    "an index that picks nothing": (
        lambda: getitem.candidates((4, 8), slice(2, 2), (2,)),
        "index: must pick something from (4, 8), got (slice(2, 2, None),)",
    ),
    "no operand": (
        lambda: elementwise.candidates([], (2,), function=ADD),
        "shapes: must be at least one, got none",
    ),
    "operands that do not broadcast": (
        lambda: elementwise.candidates([(4,), (3,)], (2,), function=ADD),
        "shapes: must broadcast with each other, got (4,) and (3,)",
    ),
    "an operand without elements": (
        lambda: elementwise.candidates([(4,), (0,)], (2,), function=ADD),
        "shapes[1]: must hold sizes of at least 1, got (0,)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        call()
    assert str(error.value) == message
