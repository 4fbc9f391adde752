"""Layout of a tensor on a device mesh: sizes, texts and slices of placements, without any device.

Placements stand one a mesh axis. Where two axes shard one dimension, the axis further left cuts first,
as DTensor has it; every cut must be even.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from types import EllipsisType
from typing import TypeAlias

from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.base import StrategyError

Placements: TypeAlias = tuple[Placement, ...]
Shape: TypeAlias = tuple[int, ...]
IndexEntry: TypeAlias = int | slice | EllipsisType | None
"""What stands between two commas of an index."""
Index: TypeAlias = tuple[IndexEntry, ...]


def checked_shape(where: str, shape: Sequence[int]) -> Shape:
    """Return `shape` as a tuple.

    Raises:
        StrategyError: it is empty, or holds something else than integers of at least 1.
    """
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise StrategyError(where, f"must hold sizes of at least 1, got {tuple(shape)}")
    return tuple(shape)


def checked_index(where: str, index: int, size: int) -> int:
    """Return `index` counted from the start.

    Raises:
        StrategyError: the index is invalid for a dimension, or a list, of `size`.
    """
    if not -size <= index < size:
        raise StrategyError(where, f"must be from {-size} to {size - 1}, got {index}")
    return index % size


def cuts(placements: Placements, mesh_shape: Shape, dims: int) -> Shape:
    """Return into how many shards each of `dims` dimensions is cut."""
    return tuple(
        prod(size for size, placement in zip(mesh_shape, placements, strict=True) if placement.is_shard(dim))
        for dim in range(dims)
    )


def local_shape(shape: Shape, placements: Placements, mesh_shape: Shape) -> Shape:
    """Return the shape of one rank's part; `Partial` has the whole one.

    Raises:
        StrategyError: a dimension cannot be cut evenly.
    """
    counts = cuts(placements, mesh_shape, len(shape))
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count:
            raise StrategyError(
                "placements", f"dimension {dim} of {shape} cannot be cut into {count} even shards"
            )
    return tuple(size // count for size, count in zip(shape, counts, strict=True))


def local_part(whole: Tensor, placements: Placements, mesh_shape: Shape, coordinate: Sequence[int]) -> Tensor:
    """Return the part of `whole` that the rank at `coordinate` of the mesh holds, a view."""
    for placement, ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            whole = whole.chunk(ranks, placement.dim)[index]
    return whole


def sharding_sequence(placements: Placements, dims: int) -> tuple[str, ...]:
    """Return for each of `dims` dimensions the mesh axes that shard it: `S0`, `S01`, `R` for none."""
    return grouped_sequence(placements, tuple((dim,) for dim in range(dims)))


def grouped_sequence(placements: Placements, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Return the sharding sequence where each group of dimensions is seen as one."""
    return tuple(
        "".join(["S", *map(str, axes)]) if (axes := _axes(placements, group)) else "R" for group in groups
    )


def leading_dimensions(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """Yield pairs of dimensions whose cuts are one: of a shape, and of another with as many elements.

    Dimensions above 1 fall into the smallest groups that hold the same elements in both shapes; a pair leads
    its group on either side.
    """
    left = [(dim, size) for dim, size in enumerate(before) if size > 1]
    right = [(dim, size) for dim, size in enumerate(after) if size > 1]
    while left:
        (source, elements), (target, others) = left.pop(0), right.pop(0)
        yield source, target
        while elements != others:
            if elements < others:
                elements *= left.pop(0)[1]
            else:
                others *= right.pop(0)[1]


def _axes(placements: Placements, dims: Sequence[int]) -> list[int]:
    """Return the mesh axes that shard any of `dims`."""
    return [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and placement.dim in dims
    ]


def explicit_index(index: Index, dims: int) -> list[int | slice | None]:
    """Return an index of a tensor with `dims` dimensions, with a slice for each that it leaves out."""
    named = sum(type(entry) in (int, slice) for entry in index)
    left_out = [slice(None)] * (dims - named)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    found: list[int | slice | None] = []
    for entry in index:
        found.extend(left_out if isinstance(entry, EllipsisType) else [entry])
    return found
