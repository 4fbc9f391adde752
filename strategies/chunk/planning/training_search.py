"""The search for loops where a backward follows: step by step down to the smallest memory that is found.

Each step takes the loop that saves most bytes for its time; a plan chooses from what the steps pass through.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from strategies.chunk.flow.grow_region import ChunkRegion
from strategies.chunk.flow.slice_inputs import with_sliced_inputs
from strategies.chunk.loops.backward import SavedFate, ScopeCall, TrainingPass, with_backward
from strategies.chunk.loops.loop import Loop, chunk_sizes
from strategies.chunk.planning.forward_search import (
    RegionCache,
    cut_positions,
    loop_range,
    used_in,
    without_loops,
)
from strategies.estimate.liveness import Profile
from strategies.estimate.operator_cost import Machine
from strategies.tracing.operator_graph import may_run_again

_LOG = logging.getLogger(__name__)
_STEPS = 24
_PATIENCE = 3  # steps
_TARGETS = 2  # operators that regions are sought around
_MORE = 9  # of them where the first ones give nothing
_CUTS = 4  # beginnings and ends of windows; a step looks at three places
_LARGE = 150  # operators: each candidate is looked at with all of backward, and fewer of them must do
_REACH = 60  # operators on each side
_LEAST_GAIN = 0.01  # of what is left, for a step
_ADD, _REBUILD = slice(1), slice(1, None)  # of what `without_loops` yields
_SLACKS = (1.02, 1.15, 1.4)  # chunks are as long as these multiples of the lowest peak allow


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOption:
    """A pass and what it needs.

    Fields:
        weight_bytes: what the search makes small: the peak, and what each other such scope saves.
        seconds: of forward and backward.
        recomputes: whether forward runs again in backward, and nothing is saved of it but its inputs.
    """

    planned: TrainingPass
    weight_bytes: int
    seconds: float
    recomputes: bool = False

    def as_call(self, machine: Machine, around: SavedFate = SavedFate.KEPT) -> ScopeCall:
        """Return the pass as the scope around it sees it, where AC does this with what it saves."""
        kept = SavedFate.RECOMPUTED if self.recomputes else SavedFate.KEPT
        return self.planned.as_call(machine, kept if around is SavedFate.KEPT else around)


class TrainingSearch:
    """The search on one graph.

    Args:
        first: nothing chunked.
        machine: whose time is saved.
        repeats: scopes like this one in the model.
        regions: of the same graph; what another search has grown is not grown again.
    """

    def __init__(
        self, first: TrainingPass, machine: Machine, repeats: int = 1, regions: RegionCache | None = None
    ) -> None:
        self._first = first
        self._machine = machine
        self._repeats = repeats
        self._is_large = len(first.schedule.items) > _LARGE
        self._cuts = _CUTS - self._is_large
        self._regions = regions or regions_of(first)

    def path(self, others: Sequence[PassOption] = ()) -> list[PassOption]:
        """Return options of less and less memory, the first with nothing chunked.

        Args:
            others: where some of these have been as small and as fast for a while, the search ends.
        """
        options = [self._option(self._first)]
        for _ in range(_STEPS):
            better = self._better(options[-1])
            if better is None:
                break
            options.append(better)
            last = options[-_PATIENCE:]
            if len(last) == _PATIENCE and all(any(_beats(other, each) for other in others) for each in last):
                break
            _LOG.info("chunks of forward and backward: %s bytes of one scope", f"{better.weight_bytes:,}")
        return _front([*options, *(each for option in options for each in self._longer(option))])

    def _option(self, planned: TrainingPass, profile: Profile | None = None) -> PassOption:
        profile = profile or planned.profile()
        saved = profile.before_bytes[len(planned.schedule.items)]
        return PassOption(
            planned=planned,
            weight_bytes=profile.peak_bytes + (self._repeats - 1) * saved,
            seconds=planned.seconds(self._machine),
        )

    def _better(self, current: PassOption) -> PassOption | None:
        least = current.weight_bytes * (1 - _LEAST_GAIN)

        def gain(option: PassOption) -> float:
            return (current.weight_bytes - option.weight_bytes) / max(option.seconds - current.seconds, 1e-7)

        for targets in self._targets(current.planned, current.planned.profile()):
            for ways in ((_ADD,), (_REBUILD,)) if self._is_large else ((_ADD, _REBUILD),):
                candidates = (each for way in ways for each in self._candidates(current, targets, way))
                found = [each for each in candidates if each.weight_bytes <= least]
                if found:
                    return max(found, key=gain)
        return None

    def _candidates(self, current: PassOption, targets: Iterable[int], way: slice) -> Iterator[PassOption]:
        """Yield options with one more loop around a target, or with shorter chunks.

        Args:
            current: what to change.
            targets: positions.
            way: whether the loops beside the target stay or are taken apart.
        """
        items = current.planned.schedule.items
        for at in targets:
            if way is _ADD and isinstance(items[at], Loop):
                yield from self._shorter(current.planned, at)
            for plain, low, high in list(without_loops(items, at))[way]:
                yield from self._new(replace(current.planned, schedule=self._with(plain)), low, high)

    def _targets(self, planned: TrainingPass, profile: Profile) -> Iterator[list[int]]:
        """Yield the item at the peak and those that made most of what is saved; then ones that made less."""
        count = len(planned.schedule.items)
        peak = profile.peak_step
        at = peak if peak < count else max(2 * count - peak, 0)
        steps = planned.schedule.steps()
        made = [sum(size for key, size in step.makes.items() if profile.last[key] >= count) for step in steps]
        largest = sorted((index for index in range(count) if made[index]), key=lambda index: -made[index])
        order = [
            index
            for index in dict.fromkeys((min(at, count - 1), *largest))
            if not self._is_fixed(planned.schedule.items[index])
        ]
        yield order[: _TARGETS + 1]
        for start in range(_TARGETS + 1, min(len(order), _MORE), _TARGETS):
            yield order[start : start + _TARGETS]

    def _is_fixed(self, item: fx.Node | Loop) -> bool:
        return isinstance(item, fx.Node) and item.op != "call_function"

    def _with(self, items: list[fx.Node | Loop]) -> Any:
        return replace(self._first.schedule, items=items)

    def _shorter(self, planned: TrainingPass, at: int) -> Iterator[PassOption]:
        items = planned.schedule.items
        loop = items[at]
        assert isinstance(loop, Loop)
        for length in [each for each in chunk_sizes(loop.size) if each <= loop.length // 2][:1]:
            changed = [*items[:at], loop.with_length(length), *items[at + 1 :]]
            yield self._option(replace(planned, schedule=self._with(changed)))

    def _longer(self, option: PassOption) -> Iterator[PassOption]:
        """Yield the option with one of its loops in longer chunks."""
        planned = option.planned
        items, profile = planned.schedule.items, planned.profile()
        for at, loop in enumerate(items):
            if not isinstance(loop, Loop):
                continue
            for length in (each for each in chunk_sizes(loop.size) if loop.length < each < loop.size):
                changed = [*items[:at], loop.with_length(length), *items[at + 1 :]]
                yield self._option(
                    replace(planned, schedule=self._with(changed)), _moved(profile, loop, at, length)
                )

    def _new(self, planned: TrainingPass, low: int, high: int) -> Iterator[PassOption]:
        items = planned.schedule.items
        if any(self._is_fixed(item) for item in items[low : high + 1]):
            return
        profile = planned.schedule.profile()
        first, last = loop_range(items, low, high, _REACH)
        at = max(range(low, high + 1), key=lambda index: profile.live_bytes[index])
        seen: set[Any] = set()
        for start in cut_positions(items, profile.before_bytes, range(first, at + 1), self._cuts):
            for stop in cut_positions(items, profile.before_bytes, range(at + 1, last + 2), self._cuts):
                window = [item for item in items[start:stop] if isinstance(item, fx.Node)]
                for region in self._regions.around(items[at], window):
                    order = hash((*items[:start], *region.before, None, *region.after, *items[stop:]))
                    key = order, tuple(region.members), tuple(region.needs.values())
                    if key not in seen:
                        seen.add(key)
                        yield from self._placed(planned, start, stop, region)

    def _placed(
        self, planned: TrainingPass, start: int, stop: int, region: ChunkRegion
    ) -> Iterator[PassOption]:
        items, schedule = planned.schedule.items, self._first.schedule
        loop = self._regions.loop(region, used_in(items[stop:]) | set(schedule.outputs))
        if loop is None:
            return
        at = start + len(region.before)
        changed: list[fx.Node | Loop] = [*items[:start], *region.before, loop, *region.after, *items[stop:]]
        trial = replace(planned, schedule=self._with(changed))
        profile = trial.profile()
        for length in self._lengths(loop, profile, at):
            resized = [*changed[:at], loop.with_length(length), *changed[at + 1 :]]
            yield self._option(
                replace(planned, schedule=self._with(resized)), _moved(profile, loop, at, length)
            )

    def _lengths(self, loop: Loop, profile: Profile, at: int) -> list[int]:
        """Return the longest chunks with which the peak is near the lowest: longer ones save time."""
        sizes = [length for length in chunk_sizes(loop.size) if length < loop.size]
        live, back = profile.live_bytes, len(profile.live_bytes) - 1 - at
        assert loop.backward is not None
        forward_bytes = live[at] - loop.memory.peak_bytes(loop.length)
        backward_bytes = live[back] - loop.backward.peak_bytes(loop.length)
        others = max((*live[:at], *live[at + 1 : back], *live[back + 1 :]))
        peaks = {
            length: max(
                others,
                forward_bytes + loop.memory.peak_bytes(length),
                backward_bytes + loop.backward.peak_bytes(length),
            )
            for length in sizes
        }
        lowest = min(peaks.values())
        found = (next(each for each in sizes if peaks[each] <= lowest * slack) for slack in _SLACKS)
        return list(dict.fromkeys(found))


def regions_of(first: TrainingPass) -> RegionCache:
    """Return the regions of a graph, whose loops have a backward."""
    storages = first.schedule.storages
    return RegionCache(storages, lambda loop: with_backward(loop, storages, first.saves), with_sliced_inputs)


def scope_options(first: TrainingPass, machine: Machine, repeats: int, around: SavedFate) -> list[PassOption]:
    """Return options of a scope of less and less memory, the first with nothing chunked.

    Args:
        first: nothing chunked.
        machine: whose time is saved.
        repeats: scopes like this one in the model.
        around: what AC does with what it saves.
    """
    graph = next(iter(first.schedule.storages.keys)).graph
    if around is not SavedFate.KEPT or repeats == 1 or not may_run_again(graph):
        return TrainingSearch(first, machine).path()
    regions = regions_of(first)
    again = [
        replace(option, recomputes=True, seconds=option.as_call(machine, SavedFate.RECOMPUTED).seconds)
        for option in TrainingSearch(first, machine, 1, regions).path()
    ]
    return _front([*TrainingSearch(first, machine, repeats, regions).path(again), *again])


def _beats(option: PassOption, other: PassOption) -> bool:
    return option.weight_bytes <= other.weight_bytes and option.seconds <= other.seconds


def _front(options: list[PassOption]) -> list[PassOption]:
    """Return the options that no other one beats, of less and less memory and more and more time."""
    found: list[PassOption] = []
    for option in sorted(options, key=lambda each: (each.seconds, each.weight_bytes)):
        if not found or option.weight_bytes < found[-1].weight_bytes:
            found.append(option)
    kept = found[:1]
    for option in found[1:]:
        if option is found[-1] or option.weight_bytes <= kept[-1].weight_bytes * (1 - _LEAST_GAIN):
            kept.append(option)
    return kept


def _moved(profile: Profile, loop: Loop, at: int, length: int) -> Profile:
    """Return the profile with chunks of `length` in place of those of 1."""
    live = list(profile.live_bytes)
    assert loop.backward is not None
    live[at] += loop.memory.peak_bytes(length) - loop.memory.peak_bytes(loop.length)
    back = len(live) - 1 - at
    live[back] += loop.backward.peak_bytes(length) - loop.backward.peak_bytes(loop.length)
    return replace(profile, live_bytes=live)
