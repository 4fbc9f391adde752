"""`softmax`: exponentials that sum to one along a dimension.

That dimension stays whole, any other may be sharded: `d^axes` candidates of `d` dimensions where everything
divides, those of DTensor's rule for `aten._softmax`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.following import follow
from strategies.shard.candidates.layout import checked_index, checked_shape
from strategies.shard.candidates.operation import Choice, LocalOperands, described


def candidates(
    input_shape: Sequence[int],
    dim: int,
    mesh_shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input.softmax(dim)`, full replication first.

    Args:
        input_shape: of input and output.
        dim: the dimension along which they sum to one, negative from the end.
        mesh_shape: sizes of the mesh axes.
        dtype: of both.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, or has no such dimension.
    """
    shape = checked_shape("input_shape", input_shape)
    dim = checked_index("dim", dim, len(shape))
    labels: list[Choice] = [None if other == dim else f"d{other}" for other in range(len(shape))]
    return follow(
        "softmax",
        [described("input", shape, labels)],
        [described("output", shape, labels, type="output")],
        partial(_softmax, dim=dim),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _softmax(local: LocalOperands, *, dim: int) -> Tensor:
    return local.tensors["input"].softmax(dim)
