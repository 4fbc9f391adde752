"""The search for loops in a forward without gradients: lower the peak, at the least time, until it fits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from strategies.chunk.loops.buffer_reuse import BufferReuse
from strategies.chunk.loops.loop import Loop, chunk_sizes
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.planning.windows import LoopPlacer, without_loops
from strategies.estimate.liveness import Profile
from strategies.estimate.machine import Machine

_LOG = logging.getLogger(__name__)
_STEPS = 40  # loops made or changed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopCandidate:
    """A schedule with one more loop, or a smaller one.

    Fields:
        heights: number of items that reach the peak of the earlier schedule.
        local_bytes: highest total among the items that are new.
        seconds: time of the whole schedule.
    """

    items: list[fx.Node | Loop]
    peak_bytes: int
    heights: int
    local_bytes: int
    seconds: float


class ForwardSearch:
    """The search on one graph.

    Args:
        machine: device whose time is saved.
        donated: inputs of the graph whose buffers may be reused.
        placer: places loops in the same graph; what another search has grown is not grown again.
    """

    def __init__(
        self,
        schedule: Schedule,
        machine: Machine,
        donated: frozenset[fx.Node] = frozenset(),
        placer: LoopPlacer | None = None,
    ) -> None:
        self._first = schedule
        self._machine = machine
        self._buffer_reuse = BufferReuse.of(schedule, donated)
        self._placer = placer or LoopPlacer(schedule)

    def fit(self, goal_bytes: int) -> Schedule:
        """Return a schedule whose peak is at most `goal_bytes`, or the smallest one that was found.

        If in-place reuse alone does not reach the goal, the first search runs without it. With it, an
        output that a loop could write to an input's buffer would seem to cost nothing, and no loop would be
        sought there.
        """
        self._first = replace(self._first, is_overwriting=True)
        if self._first.profile().peak_bytes <= goal_bytes:
            return self._first
        found: list[fx.Node | Loop] = self._first.items
        for is_overwriting in (False, True):
            self._first = replace(self._first, is_overwriting=is_overwriting)
            found = self._lowered(found, goal_bytes)
        peak_bytes = self._with(found).profile().peak_bytes
        return self._relaxed(replace(self._first, items=found), max(goal_bytes, peak_bytes))

    def _lowered(self, items: list[fx.Node | Loop], goal_bytes: int) -> list[fx.Node | Loop]:
        """Return the items with loops, changed until the peak is at the goal or nothing helps."""
        profile = self._with(items).profile()
        for _ in range(_STEPS):
            if profile.peak_bytes <= goal_bytes:
                break
            candidate = self._better(items, profile, goal_bytes)
            if candidate is None:
                break
            items = candidate.items
            profile = self._with(items).profile()
            _LOG.info("chunks of forward: %s bytes of one scope so far", f"{profile.peak_bytes:,}")
        return items

    def _with(self, items: list[fx.Node | Loop]) -> Schedule:
        return replace(self._first, items=items)

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
        """Yield loops around the highest step, instead of those that stand there."""
        at, top = profile.peak_step, profile.peak_bytes
        item = items[at]
        if isinstance(item, Loop):
            yield from self._lengthened(items, at, goal, top)
        for plain, low, high in without_loops(items, at):
            profile = self._with(plain).profile()
            for changed, loop_at, span in self._placer.positions(plain, profile, low, high):
                yield from self._lengthened(changed, loop_at, goal, top, span)

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
        profile = self._with([*items[:at], loop, *items[at + 1 :]]).profile()
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
            peak_bytes=max(elsewhere, here),
            heights=sum(live >= top for index, live in enumerate(profile.live_bytes) if index != at)
            + (here >= top),
            local_bytes=max(others, here),
            seconds=self._with(changed).seconds(self._machine),
        )

    def _in_place(self, items: list[fx.Node | Loop], at: int, loop: Loop) -> Loop:
        return self._buffer_reuse.chosen(self._with([*items[:at], loop, *items[at + 1 :]]), at)

    def _relaxed(self, schedule: Schedule, limit: int) -> Schedule:
        items = schedule.items
        for at, item in enumerate(items):
            if not isinstance(item, Loop):
                continue
            for length in chunk_sizes(item.size):
                if length <= item.length:
                    break
                changed = [*items[:at], self._in_place(items, at, item.with_length(length)), *items[at + 1 :]]
                if length < item.size and self._with(changed).profile().peak_bytes <= limit:
                    items = changed
                    break
        return replace(schedule, items=items)
