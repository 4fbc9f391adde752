"""`view`: the same elements in another shape.

Dimensions that are flattened or split belong together; of such a group a mesh axis may shard the leading
dimension, `(4, 8) -> (32)` or back, because a cut there is a cut of the elements in their order. That is
DTensor's rule for `aten.view` with even, contiguous shards.
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
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.operation import Choice, LocalOperands, described


def candidates(
    input_shape: Sequence[int],
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input.view(shape)`, full replication first.

    Args:
        input_shape: before; contiguous.
        shape: after; one size may be -1.
        mesh_shape: sizes of the mesh axes.
        dtype: of both.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, or they differ in their number of elements.
    """
    before = checked_shape("input_shape", input_shape)
    try:
        after = tuple(torch.empty(before, device="meta").view(tuple(shape)).shape)
    except RuntimeError:
        raise StrategyError("shape", f"must have the elements of {before}, got {tuple(shape)}") from None
    entering, leaving = _labels(before, after)
    return follow(
        "view",
        [described("input", before, entering)],
        [described("output", after, leaving, type="output")],
        partial(_view, shape=after, labels=leaving),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _view(local: LocalOperands, *, shape: Shape, labels: list[Choice]) -> Tensor:
    sizes = [
        size if label is None else size // local.part(label).count
        for size, label in zip(shape, labels, strict=True)
    ]
    return local.tensors["input"].reshape(sizes)


def _labels(before: Shape, after: Shape) -> tuple[list[Choice], list[Choice]]:
    """Return labels for the leading dimensions of groups with equal products; sizes of 1 have none."""
    entering: list[Choice] = [None] * len(before)
    leaving: list[Choice] = [None] * len(after)
    left = [(dim, size) for dim, size in enumerate(before) if size > 1]
    right = [(dim, size) for dim, size in enumerate(after) if size > 1]
    while left:
        (dim, elements), (to, others) = left.pop(0), right.pop(0)
        entering[dim] = leaving[to] = f"d{dim}"
        while elements != others:
            if elements < others:
                elements *= left.pop(0)[1]
            else:
                others *= right.pop(0)[1]
    return entering, leaving
