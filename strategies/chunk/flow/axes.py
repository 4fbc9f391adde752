"""Chunk axes: the part of a dimension that is cut, and the same axis after a view."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Axis(NamedTuple):
    """A chunk axis inside one dimension of a tensor.

    The dimension is seen as (outer, size, inner), and `size` is cut into chunks.

    Fields:
        dim: dimension of the tensor, not negative.
        inner: neighbouring positions of the dimension that belong to one position of the axis.
        size: number of positions of the axis.
    """

    dim: int
    inner: int
    size: int

    def at(self, dim: int) -> Axis:
        """Return the same axis inside another dimension."""
        return Axis(dim, self.inner, self.size)

    def outer(self, shape: Sequence[int]) -> int:
        """Return how often the axis repeats inside its dimension."""
        return shape[self.dim] // (self.inner * self.size)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has the axis."""
        return 0 <= self.dim < len(shape) and shape[self.dim] % (self.inner * self.size) == 0

    def factor(self, shape: Sequence[int]) -> int:
        """Return the size of the dimension for a chunk of one position."""
        return shape[self.dim] // self.size


def whole(dim: int, shape: Sequence[int]) -> Axis:
    """Return the axis that is a whole dimension."""
    return Axis(dim, 1, shape[dim])


def through_view(source: Sequence[int], target: Sequence[int], axis: Axis) -> Axis | None:
    """Return the axis of a tensor of shape `source` after a view to shape `target`.

    A view keeps the order of elements, so the axis keeps its stride in that order. `None` means that no
    dimension of the target holds the whole axis.
    """
    stride = axis.inner * prod(source[axis.dim + 1 :])
    below = 1
    for dim in range(len(target) - 1, -1, -1):
        above = below * target[dim]
        inside = below <= stride and stride * axis.size <= above
        if inside and target[dim] > 1 and stride % below == 0 and above % (stride * axis.size) == 0:
            return Axis(dim, stride // below, axis.size)
        below = above
    return None
