"""`transpose`: two dimensions change places.

A mesh axis replicates or shards any dimension, wherever it goes: `(d + 1)^axes` candidates of `d`
dimensions where everything divides, those of DTensor's rule for `aten.transpose`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.layout import checked_index, checked_shape
from strategies.shard.operators import permute


def candidates(
    input_shape: Sequence[int],
    dim0: int,
    dim1: int,
    mesh_shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input.transpose(dim0, dim1)`, full replication first.

    They are those of the `permute` that does the same.

    Args:
        input_shape: before.
        dim0: a dimension, negative from the end.
        dim1: the one that it changes places with.
        mesh_shape: sizes of the mesh axes.
        dtype: of both.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, or has no such dimension.
    """
    shape = checked_shape("input_shape", input_shape)
    first, second = checked_index("dim0", dim0, len(shape)), checked_index("dim1", dim1, len(shape))
    order = list(range(len(shape)))
    order[first], order[second] = second, first
    return permute.candidates(shape, order, mesh_shape, dtype=dtype, hardware=hardware)
