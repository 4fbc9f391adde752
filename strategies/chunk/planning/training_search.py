"""The search for loops in forward and backward: step by step down to the smallest memory that is found.

Each step adds or changes the loop that saves most bytes for its time, or where several moments are as high as
the peak, lowers one of them. All passes on the way are options that a plan chooses from.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from strategies.chunk.flow.slice_inputs import slice_inputs
from strategies.chunk.loops.backward import SavedFate, ScopeCall, TrainingPass, differentiable, with_backward
from strategies.chunk.loops.loop import Loop, chunk_sizes, make_loop
from strategies.chunk.loops.read_again import most_worth_keeping
from strategies.chunk.loops.schedule import unrolled
from strategies.chunk.planning.windows import LoopPlacer, without_loops
from strategies.estimate.liveness import Profile
from strategies.estimate.machine import Machine
from strategies.tracing.scope_graph import may_run_again

_LOG = logging.getLogger(__name__)
_STEPS = 32
_PATIENCE = 3  # steps
_TARGETS = 2  # operators that regions are sought around
_MORE = 9  # of them where the first ones give nothing
_CUTS = 4  # beginnings and ends of windows; a step looks at three places
_LARGE = 150  # operators: each candidate is looked at with all of backward, and fewer of them must do
_REACH = 60  # operators on each side
_LEAST_GAIN = 0.01  # of what is left, for a step
_NEAR = 0.97  # of the peak, from where on moments are as high as it
_LEAST_LOWERED = 0.1  # of what lies above that, for a step that leaves the peak where it is
_ADD, _REBUILD = slice(1), slice(1, None)  # of what `without_loops` yields
_LONGER = 2  # lengths that a step there tries of a loop
_SLACKS = (1.02, 1.15, 1.4)  # chunks are as long as these multiples of the lowest peak allow


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOption:
    """A pass of a scope, with its bytes and seconds.

    Fields:
        planned: the pass.
        weight_bytes: quantity that the search minimises: the peak, and the saved bytes of all other such
            scopes.
        seconds: time of forward and backward.
        live_bytes: bytes alive at each moment of the pass.
        recomputes: true where forward runs again in backward, and only its inputs are saved.
    """

    planned: TrainingPass
    weight_bytes: int
    seconds: float
    live_bytes: Sequence[int] = field(repr=False)
    recomputes: bool = False

    def above(self, level_bytes: float) -> float:
        """Return what is alive above a level, added up over all moments."""
        return sum(live - level_bytes for live in self.live_bytes if live > level_bytes)

    def as_call(self, machine: Machine, around: SavedFate = SavedFate.KEPT) -> ScopeCall:
        """Return the pass as the scope around it sees it; `around` says where AC leaves saved tensors."""
        kept = SavedFate.RECOMPUTED if self.recomputes else SavedFate.KEPT
        return self.planned.as_call(machine, kept if around is SavedFate.KEPT else around)


class TrainingSearch:
    """The search on one graph.

    Args:
        first: pass with nothing chunked.
        machine: device whose time is saved.
        repeats: number of such scopes in the model.
        placer: places loops in the same graph; what another search has grown is not grown again.
    """

    def __init__(
        self, first: TrainingPass, machine: Machine, repeats: int = 1, placer: LoopPlacer | None = None
    ) -> None:
        self._first = first
        self._machine = machine
        self._repeats = repeats
        self._is_large = _is_large(first)
        self._placer = placer or placer_of(first)
        self._keeping: dict[Hashable, Loop | None] = {}
        self._sized: dict[tuple[Loop, int], Loop] = {}

    def path(self, others: Sequence[PassOption] = ()) -> list[PassOption]:
        """Return options of less and less memory, the first with nothing chunked.

        Args:
            others: known options; the search ends when they have been as small and as fast for some steps.
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
        return _front([*options, *(each for option in options for each in self._upwards(option))])

    def _option(self, planned: TrainingPass, profile: Profile | None = None) -> PassOption:
        """Return a pass as an option, with its time, and its bytes as often as it is repeated."""
        profile = profile or planned.profile()
        saved = profile.before_bytes[len(planned.schedule.items)]
        return PassOption(
            planned=planned,
            weight_bytes=profile.peak_bytes + (self._repeats - 1) * saved,
            seconds=planned.seconds(self._machine),
            live_bytes=profile.live_bytes,
        )

    def _better(self, current: PassOption) -> PassOption | None:
        """Return the option that frees most bytes a second, by the least change that frees enough.

        Where none does, because other moments are as high as the peak, one that lowers most of these.
        """
        least = current.weight_bytes * (1 - _LEAST_GAIN)
        seen: list[PassOption] = []

        def gain(option: PassOption) -> float:
            return (current.weight_bytes - option.weight_bytes) / max(option.seconds - current.seconds, 1e-7)

        for targets in self._targets(current.planned, current.planned.profile()):
            for ways in ((_ADD,), (_REBUILD,)) if self._is_large else ((_ADD, _REBUILD),):
                candidates = [each for way in ways for each in self._candidates(current, targets, way)]
                found = [each for each in candidates if each.weight_bytes <= least]
                if found:
                    return max(found, key=gain)
                seen += candidates
        return _lowest_ridge(current, seen)

    def _candidates(self, current: PassOption, targets: Iterable[int], way: slice) -> Iterator[PassOption]:
        """Yield options with one more loop around a target, or with shorter chunks.

        Args:
            current: what to change.
            targets: positions.
            way: whether the loops next to the target stay or are taken apart.
        """
        items = current.planned.schedule.items
        for at in targets:
            item = items[at]
            if way is _ADD and isinstance(item, Loop):
                for length in [each for each in chunk_sizes(item.size) if each <= item.length // 2][:1]:
                    yield self._resized(current.planned, items, at, length)
            for plain, low, high in list(without_loops(items, at))[way]:
                yield from self._new(self._with(current.planned, plain), low, high)

    def _targets(self, planned: TrainingPass, profile: Profile) -> Iterator[list[int]]:
        """Yield positions: first the peak and the items that made most saved bytes, then other items."""
        count = len(planned.schedule.items)
        if not count:
            return
        peak = profile.peak_step
        at = peak if peak < count else max(2 * count - peak, 0)
        steps = planned.schedule.steps()
        made = [sum(size for key, size in step.makes.items() if profile.last[key] >= count) for step in steps]
        largest = sorted((index for index in range(count) if made[index]), key=lambda index: -made[index])
        order = [
            index
            for index in dict.fromkeys((min(at, count - 1), *largest))
            if not _is_fixed(planned.schedule.items[index])
        ]
        yield order[: _TARGETS + 1]
        for start in range(_TARGETS + 1, min(len(order), _MORE), _TARGETS):
            yield order[start : start + _TARGETS]

    def _with(self, planned: TrainingPass, items: list[fx.Node | Loop]) -> TrainingPass:
        return replace(planned, schedule=replace(self._first.schedule, items=items))

    def _upwards(self, option: PassOption) -> Iterator[PassOption]:
        """Yield options of less and less time, each by the change that saves most time for its bytes."""
        current = option

        def gain(option: PassOption) -> float:
            return (current.seconds - option.seconds) / max(option.weight_bytes - current.weight_bytes, 1)

        for _ in range(_STEPS):
            found = [each for each in self._faster(current) if each.seconds < current.seconds]
            if not found:
                return
            current = max(found, key=gain)
            yield current

    def _faster(self, option: PassOption) -> Iterator[PassOption]:
        """Yield the option with a loop in longer chunks, with one more value kept, or taken apart."""
        planned = option.planned
        items, profile = planned.schedule.items, planned.profile()
        for at, loop in enumerate(items):
            if not isinstance(loop, Loop):
                continue
            longer = [each for each in chunk_sizes(loop.size) if loop.length < each < loop.size]
            for length in longer[-_LONGER:]:
                yield self._resized(planned, items, at, length, profile)
            more = self._kept_more(loop)
            for instead in ([more], unrolled([loop])):
                if instead != [None]:
                    yield self._option(self._with(planned, [*items[:at], *instead, *items[at + 1 :]]))

    def _kept_more(self, loop: Loop) -> Loop | None:
        """Return the loop with the value kept that is most worth it, `None` where none is."""
        outputs = frozenset(result.node for result in loop.outputs)
        key = loop.region, outputs, loop.kept
        if loop.ahead is not None:  # backward computes nothing again
            return None
        if key not in self._keeping:
            storages, saves = self._first.schedule.storages, self._first.saves
            best = most_worth_keeping(loop, storages, saves, self._machine)
            again = None
            if best is not None:
                again = make_loop(loop.region, outputs, 1, storages, loop.kept | {best})
            self._keeping[key] = again and with_backward(again, storages, saves)
        known = self._keeping[key]
        return known and known.with_length(loop.length)

    def _new(self, planned: TrainingPass, low: int, high: int) -> Iterator[PassOption]:
        """Yield the passes with a new loop between two positions, in each of its useful lengths."""
        items = planned.schedule.items
        if any(_is_fixed(item) for item in items[low : high + 1]):
            return
        for changed, at, _ in self._placer.positions(items, planned.schedule.profile(), low, high):
            loop = changed[at]
            assert isinstance(loop, Loop)
            profile = self._with(planned, changed).profile()
            for length in self._lengths(loop, profile, at):
                yield self._resized(planned, changed, at, length, profile)

    def _resized(
        self,
        planned: TrainingPass,
        items: list[fx.Node | Loop],
        at: int,
        length: int,
        profile: Profile | None = None,
    ) -> PassOption:
        """Return the pass with chunks of `length` in the loop at a position; `profile` is that of `items`."""
        loop = items[at]
        assert isinstance(loop, Loop)
        if (loop, length) not in self._sized:  # one loop of each length, whose time is known then
            self._sized[loop, length] = loop.with_length(length)
        changed = [*items[:at], self._sized[loop, length], *items[at + 1 :]]
        moved = None if profile is None else _moved(profile, loop, at, length)
        return self._option(self._with(planned, changed), moved)

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


def placer_of(first: TrainingPass) -> LoopPlacer:
    """Return the placer of loops that have a backward."""
    storages = first.schedule.storages
    final: Collection[fx.Node] = differentiable(first.schedule.graph) if first.starts_backward else ()
    return LoopPlacer(
        first.schedule,
        lambda loop: with_backward(loop, storages, first.saves, final),
        slice_inputs,
        reach=_REACH,
        cuts=_CUTS - _is_large(first),
    )


def _is_large(first: TrainingPass) -> bool:
    return len(first.schedule.items) > _LARGE


def _is_fixed(item: fx.Node | Loop) -> bool:
    return isinstance(item, fx.Node) and item.op != "call_function"


def scope_options(first: TrainingPass, machine: Machine, repeats: int, around: SavedFate) -> list[PassOption]:
    """Return options of a scope of less and less memory, the first with nothing chunked.

    Args:
        first: pass with nothing chunked.
        machine: device whose time is saved.
        repeats: number of such scopes in the model.
        around: where AC leaves the scope's saved tensors.
    """
    if around is not SavedFate.KEPT or repeats == 1 or not may_run_again(first.schedule.graph):
        return TrainingSearch(first, machine).path()
    placer = placer_of(first)
    again = [
        replace(option, recomputes=True, seconds=option.as_call(machine, SavedFate.RECOMPUTED).seconds)
        for option in TrainingSearch(first, machine, 1, placer).path()
    ]
    return _front([*TrainingSearch(first, machine, repeats, placer).path(again), *again])


def _lowest_ridge(current: PassOption, options: Sequence[PassOption]) -> PassOption | None:
    """Return the option that lowers moments near the peak of `current` most for its time."""
    level = max(current.live_bytes) * _NEAR
    above = current.above(level)

    def gain(option: PassOption) -> float:
        return (above - option.above(level)) / max(option.seconds - current.seconds, 1e-7)

    allowed = [each for each in options if each.weight_bytes <= current.weight_bytes]
    found = [each for each in allowed if each.above(level) <= above * (1 - _LEAST_LOWERED)]
    return max(found, key=gain, default=None)


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
