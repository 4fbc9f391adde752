"""`addmm`: output = beta * input + alpha * mat1 @ mat2.

    mat1 (b0, k) x mat2 (k, n) -> output (b0, n)      + input, which broadcasts to (b0, n)

A mesh axis replicates or shards one of the three: 4^axes candidates where everything divides, those of
DTensor's rule for `aten.addmm`. The names are those of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import checked_shape
from strategies.shard.candidates.operation import (
    LocalOperands,
    OperandType,
    Operation,
    broadcast,
    broadcast_labels,
    described,
)
from strategies.shard.candidates.products import is_classic_in_rows, name_in_rows

_MATRIX = 2


def candidates(
    input_shape: Sequence[int],
    mat1_shape: Sequence[int],
    mat2_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    beta: float = 1,
    alpha: float = 1,
    mat2_type: OperandType = "arg",
    input_type: OperandType = "arg",
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `torch.addmm`, full replication first.

    `classic` is as for `linear` with one batch dimension: 14 on two axes. `complete` adds those that
    shard the rows over one axis and replicate over the other: 16.

    Args:
        input_shape: of what is added; broadcasts to `(m, n)`.
        mat1_shape: `(m, k)`.
        mat2_shape: `(k, n)`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        beta: factor of what is added.
        alpha: factor of the product.
        mat2_type: `param` for a weight.
        input_type: `param` for a bias.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or the shapes do not multiply or broadcast.
    """
    left, right = checked_shape("mat1_shape", mat1_shape), checked_shape("mat2_shape", mat2_shape)
    if len(left) != _MATRIX or len(right) != _MATRIX or left[1] != right[0]:
        raise StrategyError("mat2_shape", f"must be (k, n) for a mat1 (m, k) of {left}, got {right}")
    added = checked_shape("input_shape", input_shape)
    shape, labels = (left[0], right[1]), ("b0", "n")
    if broadcast("input_shape", added, shape) != shape:
        raise StrategyError("input_shape", f"must broadcast to {shape}, got {added}")
    flops = 2 * left[0] * left[1] * right[1]
    operation = Operation(
        name="addmm",
        inputs=(
            described("input", added, broadcast_labels(added, shape, labels), type=input_type),
            described("mat1", left, ("b0", "k")),
            described("mat2", right, ("k", "n"), type=mat2_type),
        ),
        outputs=(described("output", shape, labels, type="output"),),
        terms=(("mat1", "mat2"), ("input",)),
        dtype=dtype,
        forward_flops=flops,
        backward_flops=2 * flops,
        compute=partial(_compute, beta=beta, alpha=alpha),
    )
    return enumerate_candidates(
        operation,
        checked_shape("mesh_shape", mesh_shape),
        mode,
        name=name_in_rows,
        is_classic=is_classic_in_rows,
        hardware=hardware,
    )


def _compute(local: LocalOperands, *, beta: float, alpha: float) -> Tensor:
    """Return the local output; what is added comes after the reduction, or every rank would add it."""
    added, left, right = (local.tensors[name] for name in ("input", "mat1", "mat2"))
    if local.finish is None:
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    if not beta:  # torch leaves out what beta=0 multiplies, be it NaN, and gives it gradients of zero
        added = added.nan_to_num(0.0, 0.0, 0.0)
    return alpha * local.finish(left @ right) + beta * added
