"""`permute`: dimensions in another order.

A mesh axis replicates or shards any dimension, wherever it goes: `(d + 1)^axes` candidates of `d`
dimensions where everything divides, those of DTensor's rule for `aten.permute`.
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
from strategies.shard.candidates.layout import checked_shape
from strategies.shard.candidates.operation import LocalOperands, described


def candidates(
    input_shape: Sequence[int],
    dims: Sequence[int],
    mesh_shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input.permute(dims)`, full replication first.

    Args:
        input_shape: before.
        dims: which dimension of the input stands where, negative from the end.
        mesh_shape: sizes of the mesh axes.
        dtype: of both.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, or `dims` is no order of its dimensions.
    """
    shape = checked_shape("input_shape", input_shape)
    order = [dim % len(shape) for dim in dims if -len(shape) <= dim < len(shape)]
    if len(order) != len(dims) or sorted(order) != list(range(len(shape))):
        raise StrategyError("dims", f"must be an order of {len(shape)} dimensions, got {tuple(dims)}")
    labels = [f"d{dim}" for dim in range(len(shape))]
    return follow(
        "permute",
        [described("input", shape, labels)],
        [described("output", [shape[dim] for dim in order], [labels[dim] for dim in order], type="output")],
        partial(_permute, order=order),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _permute(local: LocalOperands, *, order: list[int]) -> Tensor:
    return local.tensors["input"].permute(order)
