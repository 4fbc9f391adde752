"""Views: `view`, `permute`, `transpose`, `split` and `getitem`.

They compute where their inputs lie, communicate nothing, and count no FLOPs. As of `pointwise` operators,
`classic` is `complete`, and with `d` dimensions that may be sharded there are (d + 1)^axes candidates.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from strategies.base import StrategyError
from strategies.shard.candidates.layout import (
    Index,
    IndexEntry,
    Shape,
    checked_index,
    checked_shape,
    explicit_index,
    leading_dimensions,
)
from strategies.shard.candidates.naming import name_by_dimensions
from strategies.shard.candidates.operation import Choices, Label, LocalOperands, Operation, operand
from strategies.shard.operators.pointwise import applied, dimension_labels


def view(input_shape: Sequence[int], shape: Sequence[int]) -> Operation:
    """Describe `input.view(shape)`: the same elements in another shape.

    Dimensions that are flattened or split belong together; of such a group a mesh axis may shard the leading
    dimension, `(4, 8) -> (32)` or back, because a cut there is a cut of the elements in their order. That is
    DTensor's rule for `aten.view` with even, contiguous shards.

    Args:
        input_shape: shape before; contiguous.
        shape: shape after; one size may be -1.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or they differ in their number of elements.
    """
    before = checked_shape("input_shape", input_shape)
    try:
        after = tuple(torch.empty(before, device="meta").view(tuple(shape)).shape)
    except RuntimeError:
        raise StrategyError("shape", f"must have the elements of {before}, got {tuple(shape)}") from None
    pairs = tuple(leading_dimensions(before, after))
    entered = {source: f"d{source}" for source, _ in pairs}
    left = {target: f"d{source}" for source, target in pairs}
    entering, leaving = list(map(entered.get, range(len(before)))), list(map(left.get, range(len(after))))
    return Operation(
        name="view",
        inputs=(operand("input", before, entering),),
        outputs=(operand("output", after, leaving, "output"),),
        terms=(("input",),),
        compute=partial(_view, shape=after, labels=tuple(leaving)),
        naming=name_by_dimensions,
    )


def permute(input_shape: Sequence[int], dims: Sequence[int]) -> Operation:
    """Describe `input.permute(dims)`; any dimension may be sharded, as in DTensor's rule for `aten.permute`.

    Args:
        dims: dimension of the input at each position, negative from the end.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or `dims` is no order of its dimensions.
    """
    shape = checked_shape("input_shape", input_shape)
    order = [dim % len(shape) for dim in dims if -len(shape) <= dim < len(shape)]
    if len(order) != len(dims) or sorted(order) != list(range(len(shape))):
        raise StrategyError("dims", f"must be an order of {len(shape)} dimensions, got {tuple(dims)}")
    labels = dimension_labels(shape)
    made = operand("output", [shape[dim] for dim in order], [labels[dim] for dim in order], "output")
    return applied("permute", torch.permute, [operand("input", shape, labels)], [made], order)


def transpose(input_shape: Sequence[int], dim0: int, dim1: int) -> Operation:
    """Describe `input.transpose(dim0, dim1)`, the `permute` that does the same.

    Args:
        dim0: a dimension, negative from the end.
        dim1: the dimension that it changes places with.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or it has no such dimension.
    """
    shape = checked_shape("input_shape", input_shape)
    first, second = checked_index("dim0", dim0, len(shape)), checked_index("dim1", dim1, len(shape))
    order = list(range(len(shape)))
    order[first], order[second] = second, first
    return permute(shape, order)


def split(input_shape: Sequence[int], sizes: int | Sequence[int], *, dim: int = 0) -> Operation:
    """Describe `input.split(sizes, dim)`: that dimension stays whole, as in DTensor's rule for `aten.split`.

    The outputs are `output_0`, `output_1`, …

    Args:
        sizes: sizes of the pieces; or one size of all but the last, which has what is left.
        dim: the dimension that is split, negative from the end.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or it has no such dimension, or the pieces
            are not all of it.
    """
    shape = checked_shape("input_shape", input_shape)
    dim = checked_index("dim", dim, len(shape))
    pieces = _pieces(shape[dim], sizes)
    labels = dimension_labels(shape, whole=(dim,))
    outputs = [
        operand(f"output_{index}", (*shape[:dim], size, *shape[dim + 1 :]), labels, "output")
        for index, size in enumerate(pieces)
    ]
    whole = operand("input", shape, labels)
    return applied("split", torch.split, [whole], outputs, list(pieces), dim)


def getitem(input_shape: Sequence[int], index: IndexEntry | Index) -> Operation:
    """Describe `input[index]` with integers, slices, `None` and an ellipsis.

    A dimension that is picked from stays whole, one that is taken as a whole may be sharded. These are the
    candidates of DTensor's rules for `aten.select` and `aten.slice`.

    Args:
        input_shape: shape before.
        index: what stands between the brackets.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or the index picks nothing from it.
    """
    shape = checked_shape("input_shape", input_shape)
    entries = index if isinstance(index, tuple) else (index,)
    after = _picked(shape, entries)
    entering, leaving = _indexed(shape, entries)
    made = operand("output", after, leaving, "output")
    whole = operand("input", shape, entering)
    return applied("getitem", operator.getitem, [whole], [made], entries)


def _view(local: LocalOperands, *, shape: Shape, labels: Choices) -> Tensor:
    cuts = [1 if label is None else local.part(label).count for label in labels]
    sizes = [size // cut for size, cut in zip(shape, cuts, strict=True)]
    return local.finished(local.tensors["input"].reshape(sizes))


def _pieces(size: int, sizes: int | Sequence[int]) -> Shape:
    """Return the sizes of the pieces that `torch.split` makes."""
    if isinstance(sizes, int):
        (step,) = checked_shape("sizes", [sizes])
        return tuple(min(step, size - start) for start in range(0, size, step))
    pieces = checked_shape("sizes", sizes)
    if sum(pieces) != size:
        raise StrategyError("sizes", f"must sum to {size}, got {pieces}")
    return pieces


def _picked(shape: Shape, index: Index) -> Shape:
    wrong = [entry for entry in index if type(entry) not in (int, slice, EllipsisType, type(None))]
    if wrong:
        raise StrategyError("index", f"must hold integers, slices, None and an ellipsis, got {wrong[0]!r}")
    try:
        after = tuple(torch.empty(shape, device="meta")[index].shape)
    except (IndexError, ValueError):  # the latter for a slice that runs backwards
        raise StrategyError("index", f"must fit a tensor of {shape}, got {index}") from None
    if 0 in after:
        raise StrategyError("index", f"must pick something from {shape}, got {index}")
    return after


def _indexed(shape: Shape, index: Index) -> tuple[list[Label], list[Label]]:
    entering: list[Label] = [None] * len(shape)
    leaving: list[Label] = []
    dim = 0
    for entry in explicit_index(index, len(shape)):
        if entry is None:
            leaving.append(None)
            continue
        if isinstance(entry, slice):
            is_whole = range(*entry.indices(shape[dim])) == range(shape[dim])
            entering[dim] = f"d{dim}" if is_whole else None
            leaving.append(entering[dim])
        dim += 1
    return entering, leaving
