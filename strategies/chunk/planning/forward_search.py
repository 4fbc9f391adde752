"""The search for loops: the peak of a schedule is cut until it fits, each time where time is lost least."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from strategies.chunk.flow.chunk_rules import is_pointwise
from strategies.chunk.flow.grow_region import ChunkRegion, RegionGrower, seeds_of
from strategies.chunk.loops.buffer_reuse import BufferReuse
from strategies.chunk.loops.loop import Loop, Schedule, chunk_sizes, make_loop, unrolled
from strategies.estimate.liveness import Profile, Storages, bytes_of
from strategies.estimate.operator_cost import Machine, cost_of, is_view

_CUTS = 7  # beginnings and ends of windows that are tried on each side of a peak
_SEEDS = 4  # values at a peak that regions grow from
_LOG = logging.getLogger(__name__)
_REACH = 90  # operators on each side of a peak that a loop can reach
_STEPS = 40  # loops made or changed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopCandidate:
    """A schedule with one more loop, or a smaller one.

    Fields:
        items: of the schedule.
        at: position of the loop.
        peak_bytes: of the whole schedule.
        heights: how many items reach the peak of the schedule before.
        local_bytes: the highest total where the schedule is new.
        seconds: of the whole schedule.
    """

    items: list[fx.Node | Loop]
    at: int
    peak_bytes: int
    heights: int
    local_bytes: int
    seconds: float


class ForwardSearch:
    """The search on one graph.

    Args:
        schedule: the operators of the graph one by one.
        machine: whose time is saved.
        donated: inputs of the graph whose memory may be reused.
    """

    def __init__(
        self, schedule: Schedule, machine: Machine, donated: frozenset[fx.Node] = frozenset()
    ) -> None:
        self._first = schedule
        self._machine = machine
        self._takeover = BufferReuse.of(schedule, donated)
        self._regions = RegionCache(schedule.storages)

    def fit(self, goal_bytes: int) -> Schedule:
        """Return a schedule whose peak is at most `goal_bytes`, or the smallest one that was found.

        Loops are sought as if no single operator overwrote its input, where that does not do on its own:
        results that a loop could write to the memory of an input would seem to cost nothing.
        """
        self._first = replace(self._first, is_overwriting=True)
        if self._first.profile().peak_bytes <= goal_bytes:
            return self._first
        found: list[fx.Node | Loop] = self._first.items
        for is_overwriting in (False, True):
            self._first = replace(self._first, is_overwriting=is_overwriting)
            found = self._lowered(found, goal_bytes)
        peak_bytes = self._profile(found).peak_bytes
        return self._relaxed(replace(self._first, items=found), max(goal_bytes, peak_bytes))

    def _lowered(self, items: list[fx.Node | Loop], goal_bytes: int) -> list[fx.Node | Loop]:
        profile = self._profile(items)
        for _ in range(_STEPS):
            if profile.peak_bytes <= goal_bytes:
                break
            candidate = self._better(items, profile, goal_bytes)
            if candidate is None:
                break
            items = candidate.items
            profile = self._profile(items)
            _LOG.info("chunks of forward: %s bytes of one scope so far", f"{profile.peak_bytes:,}")
        return items

    def _profile(self, items: list[fx.Node | Loop]) -> Profile:
        return replace(self._first, items=items).profile()

    def _seconds(self, items: list[fx.Node | Loop]) -> float:
        return replace(self._first, items=items).seconds(self._machine)

    def _better(self, items: list[fx.Node | Loop], profile: Profile, goal: int) -> LoopCandidate | None:
        """Return a schedule with a lower peak, the fastest of those that reach the goal there."""
        heights = sum(live >= profile.peak_bytes for live in profile.live_bytes)
        found = [
            candidate
            for candidate in self._candidates(items, profile, goal)
            if candidate.local_bytes < profile.peak_bytes
            and (candidate.peak_bytes, candidate.heights) < (profile.peak_bytes, heights)
        ]
        if not found:
            return None
        reaching = [candidate for candidate in found if candidate.local_bytes <= goal]
        if reaching:
            return min(reaching, key=lambda each: (each.seconds, each.local_bytes))
        lowest = min(candidate.local_bytes for candidate in found)
        close = [candidate for candidate in found if candidate.local_bytes <= lowest * 1.02]
        return min(close, key=lambda each: each.seconds)

    def _candidates(
        self, items: list[fx.Node | Loop], profile: Profile, goal: int
    ) -> Iterator[LoopCandidate]:
        at, top = profile.peak_step, profile.peak_bytes
        item = items[at]
        if isinstance(item, Loop):
            yield from self._lengthened(items, at, goal, top)
        for plain, low, high in without_loops(items, at):
            yield from self._new(plain, low, high, goal, top)

    def _new(
        self, items: list[fx.Node | Loop], low: int, high: int, goal: int, top: int
    ) -> Iterator[LoopCandidate]:
        profile = self._profile(items)
        first, last = loop_range(items, low, high)
        at = max(range(low, high + 1), key=lambda index: profile.live_bytes[index])
        starts = cut_positions(items, profile.before_bytes, range(first, at + 1))
        stops = cut_positions(items, profile.before_bytes, range(at + 1, last + 2))
        seen: set[Any] = set()
        for start in starts:
            for stop in stops:
                window = [item for item in items[start:stop] if isinstance(item, fx.Node)]
                for region in self._regions.around(items[at], window):
                    order = (*items[:start], *region.before, None, *region.after, *items[stop:])
                    key = hash(order), tuple(region.members), tuple(region.needs.values())
                    if key in seen:
                        continue
                    seen.add(key)
                    yield from self._placed(items, (start, stop), region, goal, top)

    def _placed(
        self, items: list[fx.Node | Loop], span: tuple[int, int], region: ChunkRegion, goal: int, top: int
    ) -> Iterator[LoopCandidate]:
        start, stop = span
        outside = used_in(items[stop:]) | set(self._first.outputs)
        loop = self._regions.loop(region, outside)
        if loop is None:
            return
        yield from self._lengthened(
            [*items[:start], *region.before, loop, *region.after, *items[stop:]],
            start + len(region.before),
            goal,
            top,
            span=(start, start + len(region.before) + 1 + len(region.after)),
        )

    def _lengthened(
        self,
        items: list[fx.Node | Loop],
        at: int,
        goal: int,
        top: int,
        span: tuple[int, int] | None = None,
    ) -> Iterator[LoopCandidate]:
        """Yield the schedule with the largest chunks that reach the goal, or else are near the lowest."""
        loop = items[at]
        assert isinstance(loop, Loop)
        first, last = span or (at, at + 1)
        sizes = [length for length in chunk_sizes(loop.size) if length < loop.size]
        loop = self._in_place(items, at, loop.with_length(sizes[-1]))
        profile = self._profile([*items[:at], loop, *items[at + 1 :]])
        around = profile.live_bytes[at] - loop.memory.peak_bytes(loop.length)
        others = max((*profile.live_bytes[first:at], *profile.live_bytes[at + 1 : last]), default=0)
        lowest = max(others, profile.live_bytes[at])
        allowed = goal if lowest <= goal else max(int(lowest * 1.02), goal)
        length = next(each for each in sizes if around + loop.memory.peak_bytes(each) <= allowed)
        loop = loop.with_length(length)
        here = around + loop.memory.peak_bytes(length)
        elsewhere = max((*profile.live_bytes[:at], *profile.live_bytes[at + 1 :]), default=0)
        changed = [*items[:at], loop, *items[at + 1 :]]
        yield LoopCandidate(
            items=changed,
            at=at,
            peak_bytes=max(elsewhere, here),
            heights=sum(live >= top for index, live in enumerate(profile.live_bytes) if index != at)
            + (here >= top),
            local_bytes=max(others, here),
            seconds=self._seconds(changed),
        )

    def _in_place(self, items: list[fx.Node | Loop], at: int, loop: Loop) -> Loop:
        """Return the loop with results in the memory of inputs that die with it."""
        return self._takeover.chosen(replace(self._first, items=[*items[:at], loop, *items[at + 1 :]]), at)

    def _relaxed(self, schedule: Schedule, limit: int) -> Schedule:
        """Return the schedule with each loop as long as the limit allows."""
        items = schedule.items
        for at, item in enumerate(items):
            if not isinstance(item, Loop):
                continue
            for length in chunk_sizes(item.size):
                if length <= item.length:
                    break
                changed = [*items[:at], self._in_place(items, at, item.with_length(length)), *items[at + 1 :]]
                if length < item.size and self._profile(changed).peak_bytes <= limit:
                    items = changed
                    break
        return replace(schedule, items=items)


class RegionCache:
    """The regions of one graph, each of them grown once.

    Args:
        storages: of the graph.
        finish: what is done to each new loop; it may give it up.
        trim: what is done to each new region.
    """

    def __init__(
        self,
        storages: Storages,
        finish: Callable[[Loop], Loop | None] = lambda loop: loop,
        trim: Callable[[ChunkRegion], ChunkRegion] = lambda region: region,
    ) -> None:
        self._storages = storages
        self._trim = trim
        self._finish = finish
        self._grown: dict[Any, list[ChunkRegion]] = {}
        self._loops: dict[Any, Loop | None] = {}

    def around(self, node: fx.Node | Loop, window: Sequence[fx.Node]) -> list[ChunkRegion]:
        """Return the regions of `window` that grow from the values around one node."""
        key = node, tuple(window)
        if key not in self._grown:
            assert isinstance(node, fx.Node)
            self._grown[key] = [self._trim(region) for region in _grown(node, window)]
        return self._grown[key]

    def loop(self, region: ChunkRegion, outside: set[fx.Node]) -> Loop | None:
        """Return a region as a loop with the smallest chunks; see `make_loop`."""
        key = region, frozenset(outside.intersection(region.members))
        if key not in self._loops:
            loop = make_loop(region, outside, 1, self._storages)
            self._loops[key] = loop and self._finish(loop)
        return self._loops[key]


def _grown(node: fx.Node, window: Sequence[fx.Node]) -> Iterator[ChunkRegion]:
    inside = set(window)
    near = [each for each in (*node.users, node, *node.all_input_nodes) if each in inside]
    near = [each for each in near if isinstance(each.meta["val"], Tensor)]
    near = sorted(dict.fromkeys(near), key=lambda each: -bytes_of(each.meta["val"]))[:_SEEDS]
    known: set[tuple[fx.Node, Any, Any]] = set()
    for may_copy in (_is_cheap, _never):
        growth = RegionGrower(window, may_copy)
        for seed in (seed for each in near for seed in seeds_of(each)):
            if (seed.node, seed.axis, may_copy) in known:
                continue
            region = growth.region(seed)
            if region is None or len(region.members) < 2:  # noqa: PLR2004 (one operator gains nothing)
                continue
            known.update((member, axes[0], may_copy) for member, axes in region.axes.items() if axes)
            yield region


def without_loops(items: list[fx.Node | Loop], at: int) -> Iterator[tuple[list[fx.Node | Loop], int, int]]:
    """Yield the items with some of the loops around one of them taken apart, and where that one is then."""
    before = next((i for i in range(at - 1, -1, -1) if isinstance(items[i], Loop)), None)
    after = next((i for i in range(at + 1, len(items)) if isinstance(items[i], Loop)), None)
    choices = (frozenset[int | None](), frozenset([before]), frozenset([after]), frozenset([before, after]))
    for gone in dict.fromkeys(choice - {None} for choice in choices):
        plain: list[fx.Node | Loop] = []
        low = high = 0
        for index, item in enumerate(items):
            start = len(plain)
            plain.extend(unrolled([item]) if index == at or index in gone else [item])
            if index == at:
                low, high = start, len(plain) - 1
        yield plain, low, high


def used_in(items: Sequence[fx.Node | Loop]) -> set[fx.Node]:
    """Return the values that items use."""
    used: set[fx.Node] = set()
    for item in items:
        used.update(
            (operand.node for operand in item.inputs) if isinstance(item, Loop) else item.all_input_nodes
        )
    return used


def _never(_: fx.Node) -> bool:
    return False


def _is_cheap(node: fx.Node) -> bool:
    """Whether an operator may run twice: it multiplies no matrices."""
    return cost_of(node).flops == 0 and (is_view(node) or is_pointwise(node) or "norm" in str(node.target))


def loop_range(items: Sequence[fx.Node | Loop], low: int, high: int, reach: int = _REACH) -> tuple[int, int]:
    """Return the widest range of single operators around a range that a loop may hold."""
    first, last = low - reach, high + reach
    while low > max(first, 0) and _may_be_inside(items[low - 1]):
        low -= 1
    while high < min(last, len(items) - 1) and _may_be_inside(items[high + 1]):
        high += 1
    return low, high


def _may_be_inside(item: fx.Node | Loop) -> bool:
    if isinstance(item, Loop) or item.op == "call_module":
        return False
    schema = getattr(item.target, "_schema", None)
    return schema is None or not schema.is_mutable


def cut_positions(
    items: Sequence[fx.Node | Loop], before_bytes: Sequence[int], positions: range, count: int = _CUTS
) -> list[int]:
    """Return at most `count` positions in front of which a cut costs least, both ends among them."""

    def may_cut(position: int) -> bool:
        if position >= len(items):
            return True
        item = items[position]
        return isinstance(item, Loop) or item.target is not operator.getitem

    allowed = [position for position in positions if may_cut(position)]
    if len(allowed) <= count:
        return allowed

    def alive(position: int) -> int:
        return before_bytes[position] if position < len(items) else 0

    lowest = sorted(allowed[1:-1], key=alive)[: count - 2]
    return sorted({allowed[0], *lowest, allowed[-1]})


def unchunked_schedule(graph: fx.Graph, storages: Storages, calls: Mapping[fx.Node, int]) -> Schedule:
    """Return the schedule that runs each operator of `graph` once, on whole tensors."""
    nodes: list[fx.Node | Loop] = [
        node for node in graph.nodes if node.op not in {"placeholder", "get_attr", "output"}
    ]
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    return Schedule(items=nodes, storages=storages, outputs=tuple(result), calls=calls)  # type: ignore[arg-type]
