"""`bmm`: output = input @ other, a product of matrices a batch.

    input (b, i, k) x other (b, k, j) -> output (b, i, j)

A mesh axis replicates or shards one of the four: 5^axes candidates where everything divides, those of
DTensor's rule for the einsum `bik,bkj->bij`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.enumeration import Mode, enumerate_candidates
from strategies.shard.candidates.layout import checked_shape
from strategies.shard.candidates.operation import LocalOperands, Operation, described
from strategies.shard.candidates.products import is_classic_batched, name_batched

_DIMS = 3


def candidates(
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    mesh_shape: Sequence[int],
    mode: Mode = "classic",
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of a batched matrix product.

    `classic` has those in which every axis shards and one the batch, 7 on two axes; where none of
    them cuts evenly, full replication, which the peer lacks. `complete` leaves out none.

    Args:
        input_shape: `(b, i, k)`.
        other_shape: `(b, k, j)`.
        mesh_shape: sizes of the mesh axes.
        mode: `classic` or `complete`.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape or the mode is none, or the shapes do not multiply.
    """
    left, right = checked_shape("input_shape", input_shape), checked_shape("other_shape", other_shape)
    if len(left) != _DIMS or len(right) != _DIMS or (left[0], left[2]) != right[:2]:
        raise StrategyError("other_shape", f"must be (b, k, j) for an input (b, i, k) of {left}, got {right}")
    flops = 2 * left[0] * left[1] * left[2] * right[2]
    operation = Operation(
        name="bmm",
        inputs=(described("input", left, ("b0", "i", "k")), described("other", right, ("b0", "k", "j"))),
        outputs=(described("output", (*left[:2], right[2]), ("b0", "i", "j"), type="output"),),
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
        name=name_batched,
        is_classic=is_classic_batched,
        hardware=hardware,
    )


def _compute(local: LocalOperands) -> Tensor:
    return local.finished(torch.bmm(local.tensors["input"], local.tensors["other"]))
