"""Functions of single elements, and along a dimension: `elementwise`, `softmax` and `sum_`.

They compute where their inputs lie, communicate at most the sum that they take, and count no FLOPs. In
ColossalAI they take the candidates of their producer; here they are derived like all others, so `classic` is
`complete`. With `d` dimensions that may be sharded, and divide, there are (d + 1)^axes candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.base import StrategyError
from strategies.shard.candidates.layout import Shape, checked_index, checked_shape
from strategies.shard.candidates.naming import name_by_dimensions
from strategies.shard.candidates.operation import (
    Label,
    LabelledOperand,
    LocalOperands,
    Operation,
    broadcast,
    broadcast_labels,
    operand,
)


def elementwise(shapes: Sequence[Sequence[int]], *, function: Callable[..., Tensor] = torch.add) -> Operation:
    """Describe `function(*tensors)`, which works on single elements of tensors that broadcast.

    A mesh axis replicates or shards any dimension of the output. An operand that is broadcast over a sharded
    dimension is whole, and its gradient is all-reduced. These are the candidates of DTensor's rule for
    pointwise operators whose inputs are not partial. The operands are `input` if there is one, else
    `input_0`, `input_1`, …

    Args:
        shapes: shapes of the tensors, at least one; they broadcast.
        function: `torch.mul`, `F.gelu`, …; differentiable, without random numbers. Candidates are the same
            whichever it is.

    Raises:
        StrategyError: no shape is given, a shape is empty, a size is below 1, or the shapes do not broadcast.
    """
    if not shapes:
        raise StrategyError("shapes", "must be at least one, got none")
    given = [checked_shape(f"shapes[{index}]", shape) for index, shape in enumerate(shapes)]
    onto = broadcast("shapes", *given)
    labels = dimension_labels(onto)
    names = [f"input_{index}" for index in range(len(given))] if len(given) > 1 else ["input"]
    inputs = [
        operand(name, shape, broadcast_labels(shape, onto, labels))
        for name, shape in zip(names, given, strict=True)
    ]
    return applied("elementwise", function, inputs, [operand("output", onto, labels, "output")])


def softmax(input_shape: Sequence[int], dim: int = -1) -> Operation:
    """Describe `input.softmax(dim)`: that dimension stays whole, as in DTensor's rule for `aten._softmax`.

    Args:
        input_shape: shape of input and output.
        dim: the dimension along which the output sums to one, negative from the end.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or it has no such dimension.
    """
    shape = checked_shape("input_shape", input_shape)
    dim = checked_index("dim", dim, len(shape))
    labels = dimension_labels(shape, whole=(dim,))
    made = operand("output", shape, labels, "output")
    return applied("softmax", torch.softmax, [operand("input", shape, labels)], [made], dim)


def sum_(input_shape: Sequence[int], dims: Sequence[int], *, keepdim: bool = False) -> Operation:
    """Describe `input.sum(dims, keepdim)`. DTensor's rule for `aten.sum` is the same.

    Over a sharded dimension the sum is partial: all-reduced after the forward.

    Args:
        dims: the dimensions that are summed over, at least one, negative from the end.
        keepdim: whether they stay as sizes of 1.

    Raises:
        StrategyError: the shape is empty, a size is below 1, or it has no such dimensions.
    """
    shape = checked_shape("input_shape", input_shape)
    over = tuple(checked_index("dims", dim, len(shape)) for dim in dims)
    if not over or len(set(over)) < len(over):
        raise StrategyError("dims", f"must name dimensions once, at least one, got {tuple(dims)}")
    left = [dim for dim in range(len(shape)) if keepdim or dim not in over]
    kept = dimension_labels(shape, whole=over)
    sizes = [1 if dim in over else shape[dim] for dim in left]
    made = operand("output", sizes, [kept[dim] for dim in left], "output")
    summed = operand("input", shape, dimension_labels(shape))
    return applied("sum", torch.sum, [summed], [made], over, keepdim)


def applied(
    name: str,
    function: Callable[..., Any],
    inputs: Sequence[LabelledOperand],
    outputs: Sequence[LabelledOperand],
    *arguments: object,
) -> Operation:
    """Return the operator that calls a function of torch on local parts.

    Args:
        function: function of the tensors, and then of `arguments`; it gives one tensor or several.
        inputs: operands that it reads, all in one term.
        arguments: what else it is called with, the same on every rank.
    """
    return Operation(
        name=name,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        terms=(tuple(each.name for each in inputs),),
        compute=partial(_apply, function=function, arguments=arguments),
        naming=name_by_dimensions,
    )


def dimension_labels(shape: Shape, *, whole: Sequence[int] = ()) -> list[Label]:
    """Return a label for every dimension that need not stay whole."""
    return [None if dim in whole else f"d{dim}" for dim in range(len(shape))]


def _apply(
    local: LocalOperands, *, function: Callable[..., Any], arguments: tuple[object, ...]
) -> Tensor | tuple[Tensor, ...]:
    made = function(*local.tensors.values(), *arguments)
    return local.finished(made) if isinstance(made, Tensor) else tuple(made)
