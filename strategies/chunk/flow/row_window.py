"""Row windows: which rows of a picture an operator takes for rows of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strategies.chunk.flow.axes import Axis

ROWS = 2
"""The dimension of rows: the first one in space."""


class RowWindow(NamedTuple):
    """The rows of its first input that an operator takes for a row of its result.

    For row r it takes `reach` rows, from row r · `stride` - `padding` on.

    Fields:
        stride: rows of the input from one row of the result to the next.
        padding: rows in front of the first one, and behind the last one, that the operator makes up.
        reach: rows from the first that it takes to the last.
        factor: times that it repeats a row of the input; where it is above 1, the other fields are as given.
    """

    stride: int = 1
    padding: int = 0
    reach: int = 1
    factor: int = 1

    def axes(self, axis: Axis, source: Sequence[int], made: Sequence[int]) -> tuple[Axis, Axis] | None:
        """Return the axis of the input that a chunk of the result takes, and that of the result.

        Repeated rows are made all together, so that the chunk may have a wider halo than asked for.

        Args:
            axis: rows of the result that are asked for.
            source, made: shapes of the input and the result.

        Returns:
            `None` where the rows of the input are no multiple of the positions of the axis.
        """
        inner = axis.inner // self.factor * self.stride
        is_even = axis.inner % self.factor == 0 and inner * axis.extent == source[ROWS]
        if axis.span > 1 or axis.outer(made) > 1 or not is_even:
            return None
        low, high = -(-axis.low // self.factor), -(-axis.high // self.factor)
        behind = self.stride * (high - 1) + self.reach - self.padding
        taken = axis._replace(inner=inner, low=self.stride * low + self.padding, high=max(behind, 0))
        return taken, axis._replace(low=low * self.factor, high=high * self.factor)

    def passed(self, axis: Axis, made: Sequence[int]) -> Axis | None:
        """Return the axis of a result of shape `made`, without a halo, that `axis` of the input becomes."""
        inner = axis.inner * self.factor
        is_even = inner % self.stride == 0 and inner // self.stride * axis.extent == made[ROWS]
        return axis.core._replace(inner=inner // self.stride) if is_even else None

    def place(self, taken: Axis, given: Axis, start: int, length: int) -> RowPlace:
        """Return where a chunk of the result lies, which is made of a chunk of the input.

        Args:
            taken, given: axes of the input and the result, as `axes` returns them.
        """
        first, end = given.places(start, length)
        above = max(self.padding - self.stride * first, 0)
        below = max(self.stride * (end - 1) - self.padding + self.reach - taken.extent * taken.inner, 0)
        behind = self.stride * first - taken.places(start, length)[0]
        return RowPlace(rows=end - first, above=above, below=below, behind=behind)


class RowPlace(NamedTuple):
    """The place of a chunk of rows.

    Fields:
        above, below: rows of padding that belong to the chunk.
        behind: rows of the input that the chunk has in front of the place of its first row; its window begins
            `padding` rows in front of that place.
    """

    rows: int
    above: int
    below: int
    behind: int
