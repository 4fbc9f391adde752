"""Windows: where around an operator a loop can stand, and the loops that fit there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from strategies.chunk.flow.chunk_region import ChunkRegion
from strategies.chunk.flow.chunk_rules import is_cheap, is_never
from strategies.chunk.flow.grow_region import RegionGrower, seeds_of
from strategies.chunk.loops.loop import Loop, make_loop
from strategies.chunk.loops.schedule import Schedule, unrolled
from strategies.estimate.liveness import Profile
from strategies.estimate.operator_cost import bytes_of
from strategies.tracing.channel_norms import norm_applied, norm_scales

_CUTS = 7  # beginnings and ends of windows that are tried on each side of a peak
_SEEDS = 4  # values at a peak that regions grow from
_COUNTS = frozenset({torch.ops.aten.add_.Tensor, torch.ops.aten.add_.Scalar})
_REACH = 90  # operators on each side of a peak that a loop can reach


class LoopPosition(NamedTuple):
    """A schedule's items with one more loop.

    Fields:
        items: all items of the schedule, in order.
        span: first and end position of the items that are new or in a new order.
    """

    items: list[fx.Node | Loop]
    at: int
    span: tuple[int, int]


class LoopPlacer:
    """Finds the loops that fit around an operator of one graph; grows each region and makes each loop once.

    Args:
        finish: completes each new loop, or returns `None` to give it up.
        reach: operators on each side of the target that a loop can reach.
        cuts: beginnings and ends of windows that are tried.
        may_overlap: whether pictures may be cut inside; see `RegionGrower`.
    """

    def __init__(
        self,
        schedule: Schedule,
        finish: Callable[[Loop], Loop | None] = lambda loop: loop,
        trim: Callable[[ChunkRegion], ChunkRegion] = lambda region: region,
        *,
        reach: int = _REACH,
        cuts: int = _CUTS,
        may_overlap: bool = True,
    ) -> None:
        self._storages = schedule.storages
        self._outputs = set(schedule.outputs)
        self._finish = finish
        self._trim = trim
        self._reach = reach
        self._cuts = cuts
        self._may_overlap = may_overlap
        self._grown: dict[Any, list[ChunkRegion]] = {}
        self._from_seed: dict[Any, dict[Any, tuple[ChunkRegion, ChunkRegion] | None]] = {}
        self._loops: dict[Any, Loop | None] = {}
        self._equal: dict[Any, Loop | None] = {}

    def positions(
        self, items: list[fx.Node | Loop], profile: Profile, low: int, high: int
    ) -> Iterator[LoopPosition]:
        """Yield the items with one more loop, with chunks of one position, around an operator.

        Args:
            items: items of the schedule, in order.
            low, high: first and last position of the range whose largest operator the loop holds.
        """
        first, last = _range_of_loop(items, low - self._reach, low, high, high + self._reach)
        target = max(range(low, high + 1), key=lambda index: profile.live_bytes[index])
        seen: set[Any] = set()
        stops = self._cheapest_cuts(items, profile, range(target + 1, last + 2))
        used_behind = {stop: _used_in(items[stop:]) | self._outputs for stop in stops}
        for start in self._cheapest_cuts(items, profile, range(first, target + 1)):
            for stop in stops:
                window = [item for item in items[start:stop] if isinstance(item, fx.Node)]
                for region in self._regions(items[target], window):
                    order = hash((*items[:start], *region.before, None, *region.after, *items[stop:]))
                    key = order, tuple(region.members), tuple(region.needs.values())
                    loop = None if key in seen else self._loop(region, used_behind[stop])
                    seen.add(key)
                    if loop is not None:
                        new: list[fx.Node | Loop] = [*region.before, loop, *region.after]
                        yield LoopPosition(
                            items=[*items[:start], *new, *items[stop:]],
                            at=start + len(region.before),
                            span=(start, start + len(new)),
                        )

    def _regions(self, node: fx.Node | Loop, window: Sequence[fx.Node]) -> list[ChunkRegion]:
        """Return the regions of `window` that grow from the values around one node."""
        key = node, tuple(window)
        if key not in self._grown:
            assert isinstance(node, fx.Node)
            self._grown[key] = list(self._growing(node, key[1]))
        return self._grown[key]

    def _growing(self, node: fx.Node, window: tuple[fx.Node, ...]) -> Iterator[ChunkRegion]:
        """Yield the regions of at least two operators that grow from the largest values around `node`."""
        seeds = [seed for each in _largest_near(node, set(window)) for seed in seeds_of(each)]
        grown = self._from_seed.setdefault(window, {})
        known: set[tuple[fx.Node, Any, Any]] = set()
        for may_copy in (is_cheap, is_never):
            grower = cache(
                partial(RegionGrower, window, may_copy, may_overlap=self._may_overlap)
            )  # made for the first seed that is new
            for seed in seeds:
                if (seed.node, seed.axis, may_copy) in known:
                    continue
                if (seed, may_copy) not in grown:
                    region = grower().region(seed)
                    is_useful = region is not None and len(region.members) > 1  # one operator gains nothing
                    grown[seed, may_copy] = (region, self._trim(region)) if region and is_useful else None
                found = grown[seed, may_copy]
                if found is not None:
                    region, trimmed = found
                    known.update((member, axes[0], may_copy) for member, axes in region.axes.items() if axes)
                    yield trimmed

    def _loop(self, region: ChunkRegion, outside: set[fx.Node]) -> Loop | None:
        """Return a region as a loop with the smallest chunks; see `make_loop`.

        Windows of other lengths give regions of the same members, whose loops are equal but for the region.
        """
        used = frozenset(outside.intersection(region.members))
        if (region, used) not in self._loops:
            parts = tuple(region.members), tuple(region.axes.values()), tuple(region.needs.values())
            key = parts, region.copies, region.has_sliced_inputs, used
            if key not in self._equal:
                loop = make_loop(region, outside, 1, self._storages)
                self._equal[key] = loop and self._finish(loop)
            known = self._equal[key]
            self._loops[region, used] = known and replace(known, region=region)
        return self._loops[region, used]

    def _cheapest_cuts(
        self, items: Sequence[fx.Node | Loop], profile: Profile, positions: range
    ) -> list[int]:
        """Return a few positions in front of which the fewest bytes are alive, both ends among them."""
        allowed = [at for at in positions if at >= len(items) or not self._is_part(items[at])]
        if len(allowed) <= self._cuts:
            return allowed
        before_bytes = [*profile.before_bytes, 0]
        lowest = sorted(allowed[1:-1], key=lambda at: before_bytes[min(at, len(items))])[: self._cuts - 2]
        return sorted({allowed[0], *lowest, allowed[-1]})

    def _is_part(self, item: fx.Node | Loop) -> bool:
        """Return whether no window begins with an item, because it belongs to the one in front."""
        if isinstance(item, Loop):
            return False
        parts = (operator.getitem, norm_scales, *(() if self._may_overlap else (norm_applied,)))
        return item.target in parts


def without_loops(items: list[fx.Node | Loop], at: int) -> Iterator[tuple[list[fx.Node | Loop], int, int]]:
    """Yield the items with some of the loops around one item taken apart, and the positions of that item.

    Args:
        items: items of a schedule, in order.
        at: position of the item, which is taken apart itself where it is a loop.
    """
    before = next((i for i in range(at - 1, -1, -1) if isinstance(items[i], Loop)), None)
    after = next((i for i in range(at + 1, len(items)) if isinstance(items[i], Loop)), None)
    choices = (frozenset[int | None](), frozenset([before]), frozenset([after]), frozenset([before, after]))
    for gone in dict.fromkeys(choice - {None} for choice in choices):
        parts = [
            unrolled([item]) if index == at or index in gone else [item] for index, item in enumerate(items)
        ]
        low = sum(map(len, parts[:at]))
        yield [item for part in parts for item in part], low, low + len(parts[at]) - 1


def _largest_near(node: fx.Node, window: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of the largest values among those that an operator takes and makes, and its users'."""
    near = (each for each in (*node.users, node, *node.all_input_nodes) if each in window)
    values = dict.fromkeys(each for each in near if isinstance(each.meta["val"], Tensor))
    return sorted(values, key=lambda each: -bytes_of(each.meta["val"]))[:_SEEDS]


def _range_of_loop(
    items: Sequence[fx.Node | Loop], first: int, low: int, high: int, last: int
) -> tuple[int, int]:
    """Return the widest range around [`low`, `high`], within [`first`, `last`], that a loop may hold."""
    while low > max(first, 0) and _may_be_inside(items[low - 1]):
        low -= 1
    while high < min(last, len(items) - 1) and _may_be_inside(items[high + 1]):
        high += 1
    return low, high


def _may_be_inside(item: fx.Node | Loop) -> bool:
    if isinstance(item, Loop) or item.op == "call_module":
        return False
    schema = getattr(item.target, "_schema", None)
    return schema is None or not schema.is_mutable or _is_counter(item)


def _is_counter(node: fx.Node) -> bool:
    """Return whether an operator writes to a buffer that nobody else in the graph takes: it may move."""
    written = node.args[0]
    is_buffer = isinstance(written, fx.Node) and written.op == "get_attr" and len(written.users) == 1
    return is_buffer and node.target in _COUNTS and not node.users


def _used_in(items: Sequence[fx.Node | Loop]) -> set[fx.Node]:
    used: set[fx.Node] = set()
    for item in items:
        used.update((each.node for each in item.inputs) if isinstance(item, Loop) else item.all_input_nodes)
    return used
