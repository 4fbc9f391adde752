"""`sum`: over some dimensions.

A mesh axis replicates or shards any dimension: `(d + 1)^axes` candidates of `d` dimensions where everything
divides, those of DTensor's rule for `aten.sum`. Over a sharded dimension the sum is partial: all-reduced
after the forward.
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
from strategies.shard.candidates.following import follow
from strategies.shard.candidates.layout import Shape, checked_index, checked_shape
from strategies.shard.candidates.operation import Choice, LocalOperands, described


def candidates(
    input_shape: Sequence[int],
    dims: Sequence[int],
    mesh_shape: Sequence[int],
    *,
    keepdim: bool = False,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input.sum(dims, keepdim)`, full replication first.

    Args:
        input_shape: before.
        dims: what is summed over, negative from the end.
        mesh_shape: sizes of the mesh axes.
        keepdim: whether they stay as sizes of 1.
        dtype: of both.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, or has no such dimensions.
    """
    shape = checked_shape("input_shape", input_shape)
    over = tuple(checked_index("dims", dim, len(shape)) for dim in dims)
    if not over or len(set(over)) < len(over):
        raise StrategyError("dims", f"must name dimensions once, at least one, got {tuple(dims)}")
    labels = [f"d{dim}" for dim in range(len(shape))]
    left = [dim for dim in range(len(shape)) if keepdim or dim not in over]
    kept: list[Choice] = [None if dim in over else labels[dim] for dim in left]
    return follow(
        "sum",
        [described("input", shape, labels)],
        [described("output", [1 if dim in over else shape[dim] for dim in left], kept, type="output")],
        partial(_sum, over=over, keepdim=keepdim),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _sum(local: LocalOperands, *, over: Shape, keepdim: bool) -> Tensor:
    return local.tensors["input"].sum(over, keepdim)
