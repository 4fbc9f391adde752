"""`split`: one dimension cut into pieces.

The dimension that is split stays whole, any other may be sharded: `d^axes` candidates of `d` dimensions
where everything divides, those of DTensor's rule for `aten.split`.
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
    sizes: int | Sequence[int],
    mesh_shape: Sequence[int],
    *,
    dim: int = 0,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input.split(sizes, dim)`, full replication first.

    The outputs are `output_0`, `output_1`, …

    Args:
        input_shape: before.
        sizes: of the pieces, or of each but the last, which has what is left.
        mesh_shape: sizes of the mesh axes.
        dim: the dimension that is split, negative from the end.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, has no such dimension, or the pieces are not all of it.
    """
    shape = checked_shape("input_shape", input_shape)
    dim = checked_index("dim", dim, len(shape))
    pieces = _pieces(shape[dim], sizes)
    labels: list[Choice] = [None if other == dim else f"d{other}" for other in range(len(shape))]
    return follow(
        "split",
        [described("input", shape, labels)],
        [
            described(f"output_{index}", (*shape[:dim], size, *shape[dim + 1 :]), labels, type="output")
            for index, size in enumerate(pieces)
        ],
        partial(_split, pieces=pieces, dim=dim),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _split(local: LocalOperands, *, pieces: Shape, dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.split(local.tensors["input"], list(pieces), dim))


def _pieces(size: int, sizes: int | Sequence[int]) -> Shape:
    if isinstance(sizes, int):
        (step,) = checked_shape("sizes", [sizes])
        return tuple(min(step, size - start) for start in range(0, size, step))
    pieces = checked_shape("sizes", sizes)
    if sum(pieces) != size:
        raise StrategyError("sizes", f"must sum to {size}, got {pieces}")
    return pieces
