"""Chunk regions: operators that run together, one chunk after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx

from strategies.chunk.flow.axes import Axis

Axes: TypeAlias = tuple[Axis | None, ...]
"""One axis for each input or output of an operator; `None` for one that is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSeed:
    """The beginning of a region: a value and its axis, or a sum over chunks of its inputs.

    Fields:
        node: operator that makes the value, one tensor.
        axis: chunk axis of the value; `None` for a sum over chunks.
        ins: axes of the operator's inputs, for a sum.
        way: names the way among those of the node, on whatever shapes.
    """

    node: fx.Node
    axis: Axis | None
    ins: Axes = ()
    way: tuple[str | int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkRegion:
    """Operators that run together, chunk by chunk.

    Fields:
        axes: axes of each member's outputs; `()` marks a sum over chunks.
        needs: axes of each member's tensor inputs.
        before: operators that must run in front of the loop, in order.
        after: operators of the window that run behind the loop, in order.
        copies: members that also run in front of the loop.
        has_sliced_inputs: true where the region takes parts of values; see `slice_inputs`.
    """

    members: list[fx.Node]
    axes: Mapping[fx.Node, Axes]
    needs: Mapping[fx.Node, Axes]
    before: list[fx.Node]
    after: list[fx.Node]
    copies: frozenset[fx.Node]
    window: Sequence[fx.Node]
    seed: RegionSeed
    may_copy: Callable[[fx.Node], bool]
    may_overlap: bool
    has_sliced_inputs: bool = False
