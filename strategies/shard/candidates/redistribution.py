"""Redistribution: the steps that bring a tensor from one layout to another, and what they communicate.

A step changes the placement on one mesh axis:

    Partial(a)   → Replicate    all_reduce        backward: nothing, the gradient is replicated
    Partial(a)   → Shard(d)     reduce_scatter    backward: all_gather
    Shard(d)     → Replicate    all_gather        backward: a slice
    Shard(d)     → Shard(e)     all_to_all        backward: all_to_all
    Replicate    → Shard(d)     a slice           backward: all_gather

Each is one collective over the ranks of one axis, or none. All steps are planned ahead, so that what runs
is what was promised, whatever shortcuts a release of DTensor takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, TypeAlias

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.base import StrategyError
from strategies.shard.candidates.layout import Placements, Shape, cuts, local_shape

CollectiveKind: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
Phase: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutStep:
    """A change of placement on one mesh axis.

    Fields:
        payload_bytes: the larger of what a rank has before and after.
    """

    axis: int
    ranks: int
    source: Placement
    target: Placement
    payload_bytes: int

    @property
    def kind(self) -> CollectiveKind | None:
        """The collective it takes; `None` for a slice of what every rank has."""
        if self.source.is_replicate():
            return None
        if self.source.is_partial():
            return "reduce_scatter" if self.target.is_shard() else "all_reduce"
        return "all_to_all" if self.target.is_shard() else "all_gather"


Steps: TypeAlias = tuple[LayoutStep, ...]
"""Changes of placement, one after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """A collective that every rank takes part in once a step.

    Fields:
        phase: `forward` or `backward`.
        mesh_axis: the axis whose ranks meet.
        payload_bytes: the larger of what a rank gives and what it gets, as meters count it.
        operand: name of the operand that is moved, or whose gradient is.
    """

    phase: Phase
    kind: CollectiveKind
    mesh_axis: int
    ranks: int
    payload_bytes: int
    operand: str

    @property
    def link_bytes(self) -> float:
        """Bytes that a rank sends and receives in a ring: `(n-1)/n` of the payload, twice to all-reduce.

        Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations.
        """
        return _link_share(self.kind, self.ranks) * self.payload_bytes


@lru_cache(maxsize=65536)
def steps_between(
    source: Placements, target: Placements, *, shape: Shape, mesh_shape: Shape, itemsize: int
) -> Steps:
    """Return the steps from `source` to `target` that move the fewest bytes a rank.

    An axis goes straight to its target, or by way of `Replicate` where two axes shard one dimension
    and the inner one is in the way. Axes of size 1 need no step.

    Args:
        target: placements after, `Partial` only where the source has it.
        shape: shape of the whole tensor.
        mesh_shape: sizes of the mesh axes.

    Raises:
        StrategyError: a target cannot be reached, or does not cut the tensor evenly.
    """
    _check_reachable(source, target)
    local_shape(shape, target, mesh_shape)
    start = tuple(
        after if size == 1 else before for before, after, size in zip(source, target, mesh_shape, strict=True)
    )
    # cost of a path: bytes on the links, collectives, steps; the counter keeps the order total
    queue: list[tuple[float, int, int, int, Placements, Steps]] = [(0.0, 0, 0, 0, start, ())]
    settled: set[Placements] = set()
    pushed = 0
    while True:
        link_bytes, collectives, length, _, state, steps = heapq.heappop(queue)
        if state == target:
            return steps
        if state in settled:
            continue
        settled.add(state)
        for step in _steps(state, target, shape, mesh_shape, itemsize):
            pushed += 1
            extended = (
                link_bytes + (_link_share(step.kind, step.ranks) * step.payload_bytes if step.kind else 0.0),
                collectives + (step.kind is not None),
                length + 1,
                pushed,
                (*state[: step.axis], step.target, *state[step.axis + 1 :]),
                (*steps, step),
            )
            heapq.heappush(queue, extended)


def reversed_steps(steps: Steps) -> Steps:
    """Return what a gradient goes through, from the layout after `steps` to the one before.

    The gradient of what was `Partial` is replicated: an all-reduce needs nothing in return.
    """
    return tuple(
        LayoutStep(
            axis=step.axis,
            ranks=step.ranks,
            source=step.target,
            target=Replicate() if step.source.is_partial() else step.source,
            payload_bytes=step.payload_bytes,
        )
        for step in reversed(steps)
        if step.kind != "all_reduce"
    )


def collectives(steps: Steps, *, phase: Phase, operand: str) -> tuple[Collective, ...]:
    """Return those of `steps` that communicate."""
    return tuple(
        Collective(
            phase=phase,
            kind=step.kind,
            mesh_axis=step.axis,
            ranks=step.ranks,
            payload_bytes=step.payload_bytes,
            operand=operand,
        )
        for step in steps
        if step.kind is not None
    )


def _check_reachable(source: Placements, target: Placements) -> None:
    for before, after in zip(source, target, strict=True):
        if after.is_partial() and before != after:
            problem = f"{before!r} cannot become {after!r}"
            raise StrategyError("placements", f"{problem}; reduce to Replicate or Shard")


def _link_share(kind: CollectiveKind, ranks: int) -> float:
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def _steps(
    state: Placements, target: Placements, shape: Shape, mesh_shape: Shape, itemsize: int
) -> Iterator[LayoutStep]:
    """Yield the steps that are possible in `state` and may lead to `target`."""
    for axis, (current, wanted) in enumerate(zip(state, target, strict=True)):
        for after in {wanted: None, Replicate(): None}:
            is_open = after != current and not (current.is_partial() and wanted.is_partial())
            if not is_open or not _is_innermost(state, axis, after, mesh_shape):
                continue
            following = (*state[:axis], after, *state[axis + 1 :])
            if any(
                size % count
                for size, count in zip(shape, cuts(following, mesh_shape, len(shape)), strict=True)
            ):
                continue
            sizes = (prod(local_shape(shape, each, mesh_shape)) for each in (state, following))
            yield LayoutStep(
                axis=axis,
                ranks=mesh_shape[axis],
                source=current,
                target=after,
                payload_bytes=max(sizes) * itemsize,
            )


def _is_innermost(state: Placements, axis: int, after: Placement, mesh_shape: Shape) -> bool:
    """Return whether no axis further right shards a dimension that this one stops or starts to shard."""
    dims = {placement.dim for placement in (state[axis], after) if isinstance(placement, Shard)}
    return not any(
        isinstance(placement, Shard) and placement.dim in dims and size > 1
        for placement, size in zip(state[axis + 1 :], mesh_shape[axis + 1 :], strict=True)
    )
