"""Chunk axes: the part of a tensor's dimensions that is cut, and the same axis after a view."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from torch import Tensor


class Axis(NamedTuple):
    """A chunk axis inside one dimension of a tensor, or inside neighbouring ones that are seen as one.

    The dimension is seen as (outer, `before` + `size` + `behind`, inner), and `size` is cut into chunks. A
    chunk has as many dimensions as the tensor; of merged ones all but the last have one position.

    Fields:
        dim: first dimension of the tensor, not negative.
        inner: neighbouring positions of the dimension that belong to one position of the axis.
        size: number of positions of the axis.
        span: number of dimensions that are seen as one.
        before, behind: positions in front of the axis and behind it, which no chunk has.
        low, high: the halo: neighbouring positions of the dimension that a chunk has beside its own, in front
            and behind, where the dimension has them. Only axes of one dimension, which repeat once, have one.
    """

    dim: int
    inner: int
    size: int
    span: int = 1
    before: int = 0
    behind: int = 0
    low: int = 0
    high: int = 0

    @property
    def dims(self) -> range:
        """The dimensions of the tensor that the axis lies in."""
        return range(self.dim, self.dim + self.span)

    @property
    def extent(self) -> int:
        """The positions of the axis and those around it."""
        return self.before + self.size + self.behind

    @property
    def is_complete(self) -> bool:
        """True if the chunks together are the whole tensor."""
        return self.size == self.extent

    @property
    def core(self) -> Axis:
        """The axis without its halo."""
        return self._replace(low=0, high=0) if self.has_halo else self

    @property
    def has_halo(self) -> bool:
        """True if chunks overlap."""
        return bool(self.low or self.high)

    def covers(self, other: Axis) -> bool:
        """Return whether chunks of the axis hold those of another one."""
        return self.low >= other.low and self.high >= other.high and self.core == other.core

    def with_halo_of(self, other: Axis) -> Axis:
        """Return the axis whose chunks hold those of both."""
        return self._replace(low=max(self.low, other.low), high=max(self.high, other.high))

    def places(self, start: int, length: int) -> tuple[int, int]:
        """Return the first and the end position of the dimension that a chunk has, its halo included."""
        first = (self.before + start) * self.inner - self.low
        end = (self.before + start + length) * self.inner + self.high
        return max(first, 0), min(end, self.extent * self.inner)

    def at(self, dim: int, span: int = 1) -> Axis:
        """Return the same axis inside other dimensions."""
        return self._replace(dim=dim, span=span)

    def outer(self, shape: Sequence[int]) -> int:
        """Return how often the axis repeats inside its dimension."""
        return self._width(shape) // (self.inner * self.extent)

    def factor(self, shape: Sequence[int]) -> int:
        """Return the size of the dimension for a chunk of one position."""
        return self._width(shape) // self.extent

    def share(self, nbytes: int) -> int:
        """Return the bytes that all chunks have of a tensor of `nbytes`, without their halos."""
        return nbytes * self.size // self.extent

    def halo_bytes(self, nbytes: int) -> int:
        """Return the bytes of the halo of one chunk of a tensor of `nbytes`."""
        return nbytes * (self.low + self.high) // (self.extent * self.inner)

    def is_one_stride(self, tensor: Tensor) -> bool:
        """Return whether the dimensions of the axis lie in `tensor` as one would."""
        wide = [dim for dim in self.dims if tensor.shape[dim] > 1]
        return all(
            tensor.stride(one) == tensor.stride(other) * tensor.shape[other] for one, other in pairwise(wide)
        )

    def chunk_shape(self, shape: Sequence[int], width: Any) -> list[Any]:
        """Return the shape of a chunk whose dimension has `width` positions."""
        return [*shape[: self.dim], *[1] * (self.span - 1), width, *shape[self.dim + self.span :]]

    def _width(self, shape: Sequence[int]) -> int:
        return prod(shape[dim] for dim in self.dims)


def whole(dim: int, shape: Sequence[int]) -> Axis:
    """Return the axis that is a whole dimension."""
    return Axis(dim, 1, shape[dim])


def through_view(source: Sequence[int], target: Sequence[int], axis: Axis) -> Axis | None:
    """Return the axis of a tensor of shape `source` after a view to shape `target`.

    A view keeps the order of elements, so the axis keeps its stride in that order. `None` means that no
    neighbouring dimensions of the target hold the whole axis, or that the axis has a halo.
    """
    if axis.has_halo:
        return None
    stride = axis.inner * prod(source[axis.dim + axis.span :])
    top = stride * axis.extent
    below, last, bottom = 1, None, 1
    for dim in range(len(target) - 1, -1, -1):
        above = below * target[dim]
        if last is None and stride < above:
            last, bottom = dim, below
        if last is not None and top <= above:
            fits = stride % bottom == 0 and above % top == 0
            return axis.at(dim, last - dim + 1)._replace(inner=stride // bottom) if fits else None
        below = above
    return None


def through_slice(target: Sequence[int], axis: Axis, first: int, width: int) -> Axis | None:
    """Return the axis after a dimension becomes one of `width` positions, of which it has those from `first`.

    Args:
        target: shape with the dimension as it is before.
        first: position that the dimension begins at in the new one; negative where positions are cut off.

    Returns:
        `None` where positions of the axis are cut off, or parts of a position, or the axis has a halo.
    """
    if axis.has_halo or axis.span > 1 or axis.outer(target) > 1 or first % axis.inner or width % axis.inner:
        return None
    before = axis.before + first // axis.inner
    behind = width // axis.inner - before - axis.size
    return axis._replace(before=before, behind=behind) if before >= 0 and behind >= 0 else None
