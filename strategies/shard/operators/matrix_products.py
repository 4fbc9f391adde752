"""Matrix products: `linear`, `matmul`, `bmm` and `addmm`.

On a mesh axis that shards a label, the collectives follow from which operands have it. Of a linear:

    k     the output is partial: all-reduced after the forward
    n     the gradient of the input is partial: all-reduced in the backward
    b_i   the gradients of weight and bias are partial: all-reduced in the backward

With `b` batch dimensions, a product with a matrix has (b + 3)^axes complete candidates where everything
divides. ColossalAI leaves out those that shard two different batch dimensions, and those that shard a batch
dimension and replicate the rest: on two axes it has 9 + 5·b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the name everybody uses)

from strategies.base import StrategyError
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.naming import (
    is_classic_batched,
    is_classic_in_rows,
    name_batched,
    name_in_rows,
)
from strategies.shard.candidates.operation import (
    LabelledOperand,
    LocalOperands,
    Operation,
    broadcast,
    broadcast_labels,
    operand,
)

_MATRIX = 2


def linear(input_shape: Sequence[int], out_features: int, *, bias: bool = True) -> Operation:
    """Describe output = input x weight^T + bias: (b0, …, k) x (n, k) -> (b0, …, n), and (n).

    Args:
        input_shape: `(…, k)`; all but the last are batch dimensions.
        out_features: `n`.

    Raises:
        StrategyError: a shape is empty, or a size is below 1.

    Source: ColossalAI's test of the linear handler (auto_parallel/tensor_shard).
    """
    shape = checked_shape("input_shape", input_shape)
    (features,) = checked_shape("out_features", [out_features])
    batch, rows = _batch_labels(shape[:-1]), _rows(shape[:-1])
    biases = [operand("bias", [features], ["n"], "param")] if bias else []
    return Operation(
        name="linear",
        inputs=(
            operand("input", shape, (*batch, "k"), logical=rows),
            operand("weight", (features, shape[-1]), ("n", "k"), "param", logical=[[1], [0]]),
            *biases,
        ),
        outputs=(operand("output", (*shape[:-1], features), (*batch, "n"), "output", logical=rows),),
        terms=(("input", "weight"), ("bias",))[: 1 + bias],
        forward_flops=2 * prod(shape) * features,
        compute=_linear,
        naming=name_in_rows,
        is_classic=is_classic_in_rows,
    )


def matmul(input_shape: Sequence[int], other_shape: Sequence[int]) -> Operation:
    """Describe output = input @ other, as `torch.matmul` has it: vectors, matrices, batches that broadcast.

    With a matrix or a vector, (b0, …, k) x (k, n) -> (b0, …, n), the candidates are those of `linear`; with a
    batch, (b0, …, i, k) x (b0, …, k, j) -> (b0, …, i, j), those of `bmm`. A dimension of size 1 that
    broadcasts is never sharded; its operand's gradient is reduced instead. DTensor has the same rule for
    einsums, but takes all batch dimensions as one.

    Args:
        input_shape: `(…, i, k)` or `(k,)`.
        other_shape: `(…, k, j)` or `(k,)`.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or the shapes do not multiply.
    """
    left, right = checked_shape("input_shape", input_shape), checked_shape("other_shape", other_shape)
    contracted = right[-_MATRIX:][0]
    if left[-1] != contracted:
        problem = f"must multiply with {left}, which has {left[-1]} columns"
        raise StrategyError("other_shape", f"{problem}, got {right}")
    is_in_rows = len(right) <= _MATRIX
    *inputs, made = (_in_rows if is_in_rows else _batched)(left, right)
    return Operation(
        name="matmul",
        inputs=tuple(inputs),
        outputs=(made,),
        terms=(("input", "other"),),
        forward_flops=2 * prod(made.shape) * contracted,
        compute=_matmul,
        naming=name_in_rows if is_in_rows else name_batched,
        is_classic=is_classic_in_rows if is_in_rows else is_classic_batched,
    )


def bmm(input_shape: Sequence[int], other_shape: Sequence[int]) -> Operation:
    """Describe a product of matrices a batch: (b, i, k) x (b, k, j) -> (b, i, j).

    There are 5^axes complete candidates where everything divides, those of DTensor's rule for the einsum
    `bik,bkj->bij`. `classic` has those in which every axis shards and one the batch, 7 on two axes; where
    none of them cuts evenly, full replication, which ColossalAI lacks.

    Args:
        input_shape: `(b, i, k)`.
        other_shape: `(b, k, j)`.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or the shapes do not multiply.
    """
    left, right = checked_shape("input_shape", input_shape), checked_shape("other_shape", other_shape)
    if (len(left), len(right)) != (3, 3) or (left[0], left[2]) != right[:2]:
        raise StrategyError("other_shape", f"must be (b, k, j) for an input (b, i, k) of {left}, got {right}")
    return replace(matmul(left, right), name="bmm")


def addmm(
    input_shape: Sequence[int],
    mat1_shape: Sequence[int],
    mat2_shape: Sequence[int],
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Operation:
    """Describe output = beta * input + alpha * mat1 @ mat2: (b0, k) x (k, n) -> (b0, n), and what is added.

    The candidates are those of a `linear` with one batch dimension, and of DTensor's rule for `aten.addmm`.

    Args:
        input_shape: what is added; it broadcasts to `(m, n)`.
        mat1_shape: `(m, k)`.
        mat2_shape: `(k, n)`.

    Raises:
        StrategyError: a shape is empty, a size is below 1, or the shapes do not multiply or broadcast.
    """
    left, right = checked_shape("mat1_shape", mat1_shape), checked_shape("mat2_shape", mat2_shape)
    if (len(left), len(right)) != (2, 2) or left[1] != right[0]:
        raise StrategyError("mat2_shape", f"must be (k, n) for a mat1 (m, k) of {left}, got {right}")
    added = checked_shape("input_shape", input_shape)
    shape, labels = (left[0], right[1]), ("b0", "n")
    if broadcast("input_shape", added, shape) != shape:
        raise StrategyError("input_shape", f"must broadcast to {shape}, got {added}")
    return Operation(
        name="addmm",
        inputs=(
            operand("input", added, broadcast_labels(added, shape, labels)),
            operand("mat1", left, ("b0", "k")),
            operand("mat2", right, ("k", "n")),
        ),
        outputs=(operand("output", shape, labels, "output"),),
        terms=(("mat1", "mat2"), ("input",)),
        forward_flops=2 * left[0] * left[1] * right[1],
        compute=partial(_addmm, beta=beta, alpha=alpha),
        naming=name_in_rows,
        is_classic=is_classic_in_rows,
    )


def _in_rows(left: Shape, right: Shape) -> tuple[LabelledOperand, ...]:
    """Return inputs and output where all dimensions of `input` but the last are batch dimensions."""
    batch, rows = _batch_labels(left[:-1]), _rows(left[:-1])
    columns = ("n",) if len(right) == _MATRIX else ()
    return (
        operand("input", left, (*batch, "k"), logical=rows),
        operand("other", right, ("k", *columns)),
        operand(
            "output", (*left[:-1], *right[1:]), (*batch, *columns), "output", logical=rows[: 1 + len(columns)]
        ),
    )


def _batched(left: Shape, right: Shape) -> tuple[LabelledOperand, ...]:
    batches = left[:-_MATRIX], right[:-_MATRIX]
    batch = broadcast("batch dimensions", *batches)
    labels = _batch_labels(batch)
    one, other = (broadcast_labels(shape, batch, labels) for shape in batches)
    rows = ("i",) if len(left) >= _MATRIX else ()
    return (
        operand("input", left, (*one, *rows, "k")),
        operand("other", right, (*other, "k", "j")),
        operand("output", (*batch, *left[-_MATRIX:-1], right[-1]), (*labels, *rows, "j"), "output"),
    )


def _batch_labels(batch: Shape) -> tuple[str, ...]:
    return tuple(f"b{dim}" for dim in range(len(batch)))


def _rows(batch: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the logical dimensions of a tensor with these batch dimensions and columns: rows, columns."""
    return tuple(range(len(batch))), (len(batch),)


def _linear(local: LocalOperands) -> Tensor:
    """Return the local output; the bias comes after the reduction, or every rank would add it."""
    tensors = local.tensors
    bias = tensors.get("bias")
    if local.finish is None:
        return F.linear(tensors["input"], tensors["weight"], bias)
    product = local.finish(F.linear(tensors["input"], tensors["weight"]))
    return product if bias is None else product + bias


def _matmul(local: LocalOperands) -> Tensor:
    return local.finished(torch.matmul(local.tensors["input"], local.tensors["other"]))


def _addmm(local: LocalOperands, *, beta: float, alpha: float) -> Tensor:
    """Return the local output; what is added comes after the reduction, or every rank would add it."""
    added, left, right = (local.tensors[name] for name in ("input", "mat1", "mat2"))
    if local.finish is None:
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    if not beta:  # torch leaves out what beta=0 multiplies, be it NaN, and gives it gradients of zero
        added = added.nan_to_num(0.0, 0.0, 0.0)
    return alpha * local.finish(left @ right) + beta * added
