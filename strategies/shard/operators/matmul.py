"""`matmul`: output = input @ other, as `torch.matmul` has it: vectors, matrices, batches that broadcast.

    input (b0, …, k) x other (k, n) -> output (b0, …, n)                    other has no batch: as `linear`
    input (b0, …, i, k) x other (b0, …, k, j) -> output (b0, …, i, j)       other has: as `bmm`

A dimension of size 1 that broadcasts is never sharded; its operand's gradient is reduced instead.
Candidates are those of DTensor's rule for einsums, and each batch dimension stands for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.operation import (
    Dimensions,
    LocalOperands,
    OperandType,
    Operation,
    broadcast,
    broadcast_labels,
    described,
)
from strategies.shard.candidates.products import (
    is_classic_batched,
    is_classic_in_rows,
    name_batched,
    name_in_rows,
)

_MATRIX = 2


def candidates(
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    other_type: OperandType = "arg",
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of a matrix product, full replication first.

    Where `other` is a matrix or a vector `classic` is as for `linear`, 14 for two matrices on two
    axes; else as for `bmm`. `complete` is every choice that cuts evenly.

    Args:
        input_shape: `(…, i, k)` or `(k,)`.
        other_shape: `(…, k, j)` or `(k,)`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        other_type: `param` for a weight.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or the shapes do not multiply.
    """
    left, right = checked_shape("input_shape", input_shape), checked_shape("other_shape", other_shape)
    rows = right[-_MATRIX:][0]
    if left[-1] != rows:
        raise StrategyError(
            "other_shape", f"must multiply with {left}, which has {left[-1]} columns, got {right}"
        )
    in_rows = len(right) <= _MATRIX
    inputs, output = (_in_rows if in_rows else _batched)(left, right, other_type)
    flops = 2 * prod(output.shape) * rows
    operation = Operation(
        name="matmul",
        inputs=inputs,
        outputs=(output,),
        terms=(("input", "other"),),
        dtype=dtype,
        forward_flops=flops,
        backward_flops=2 * flops,
        compute=_compute,
    )
    return enumerate_candidates(
        operation,
        checked_shape("mesh_shape", mesh_shape),
        mode,
        name=name_in_rows if in_rows else name_batched,
        is_classic=is_classic_in_rows if in_rows else is_classic_batched,
        hardware=hardware,
    )


def _in_rows(left: Shape, right: Shape, other_type: OperandType) -> tuple[tuple[Dimensions, ...], Dimensions]:
    """Return inputs and output where all dimensions of `input` but the last are batch dimensions."""
    batch = tuple(f"b{dim}" for dim in range(len(left) - 1))
    columns = ("n",) if len(right) == _MATRIX else ()
    rows = tuple(range(len(batch)))
    inputs = (
        Dimensions(name="input", type="arg", shape=left, labels=(*batch, "k"), logical=(rows, (len(batch),))),
        described("other", right, ("k", *columns), type=other_type),
    )
    output = Dimensions(
        name="output",
        type="output",
        shape=(*left[:-1], *right[1:]),
        labels=(*batch, *columns),
        logical=(rows, *((len(batch),) for _ in columns)),
    )
    return inputs, output


def _batched(left: Shape, right: Shape, other_type: OperandType) -> tuple[tuple[Dimensions, ...], Dimensions]:
    """Return inputs and output where both may have batch dimensions, which broadcast."""
    batch = broadcast("batch dimensions", left[:-_MATRIX], right[:-_MATRIX])
    labels = tuple(f"b{dim}" for dim in range(len(batch)))
    rows = ("i",) if len(left) >= _MATRIX else ()
    inputs = (
        described("input", left, (*broadcast_labels(left[:-_MATRIX], batch, labels), *rows, "k")),
        described(
            "other",
            right,
            (*broadcast_labels(right[:-_MATRIX], batch, labels), "k", "j"),
            type=other_type,
        ),
    )
    shape = (*batch, *left[-_MATRIX:-1], right[-1])
    return inputs, described("output", shape, (*labels, *rows, "j"), type="output")


def _compute(local: LocalOperands) -> Tensor:
    return local.finished(torch.matmul(local.tensors["input"], local.tensors["other"]))
