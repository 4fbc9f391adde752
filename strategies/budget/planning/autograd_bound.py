"""The fewest FLOPs run again by schedules that leave backward to autograd.

The captured step says what autograd's backward does: its moments, in its order; what lives at each of them
where nobody holds a value of a block for it (`held_bytes`); when a node asks for a value, and until when it
holds it. A schedule *leaves backward to autograd* if all of that stays. It only decides which of the values
that nodes ask for are kept or moved to the host, and which the operators of forward make again, across blocks
and as often as it likes: what a block hands on is such a value, though the captured step holds it where
several blocks ask for it. What operators outside of blocks make is never made again: what runs again holds
it. What they ask for lives as it does without a plan. An operator that writes to a storage in place runs
again with the storage's maker, or makes another content of it, where others have read what it was.

Take a moment m after the last forward of a block, and in any such schedule:

1. What the captured step has then, it has, too: `held_bytes`.
2. So is each value that a node has asked for before m and still holds.
3. A value that a node asks for at m or later, and that is not there by 1 or 2, is carried through m, maybe on
   the host (`there` = 1), or made after m (`again` = 1): `there` + `again` >= 1.
4. What is made after m has been made before, in forward, so its cost is paid again. What its maker reads is
   there, carried or made after m: `there` + `again` >= `again` of the reader. `again` of what comes from
   outside of the blocks is 0.
5. What is held and carried is within the budget, and what waits on the host in the room there.

The bound is the largest over several m (`recomputation`).

Of several moments *together*, a schedule has `there` at each, and `again` for what is made from each to the
next. What is asked for between two of them is there at the first or made before the second, with what its
maker reads. What is there at the second was so at the first, is held by a node, or was made between. What is
made at or after a moment is made in one of the times that follow. So what a block near the end of backward
makes again counts beside what does not fit where backward begins.

The bound says nothing of a backward in another order. Each content of a storage counts as one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.recomputation import OUTSIDE, Maker, Moment, Recomputation
from strategies.budget.planning.units import Unit
from strategies.step.step_graph import BlockCall, StepGraph, StepOperator

_TRIED = 24
_WHOLE = 4
"""Moments at which the bound is sought, and those with whole values: of eight networks more changed none."""

_PARTS = 48
_TOGETHER = 6
_MORE = 1 + 1e-6
"""Parts of backward of which a moment is looked at together with others, the most that are added so, and the
factor by which one has to raise the bound."""

_PROMINENT, _MORE_PEAKS = 0.75, 4
"""Prominence of the peaks of backward that are looked at together first, as a share of the highest, and how
many more are."""

_MOST_TOGETHER, _MOST_UNKNOWNS = 600, 40_000
"""Storages up to which moments are looked at together, and the unknowns of all programmes after which no more
moments are: about a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A node of backward asks for a value.

    Fields:
        storage: the storage of the value, by its number in the step.
        moment: the moment at which it is asked for.
        until: the last moment at which the node holds it.
    """

    storage: int
    moment: int
    until: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """Backward of one step, as every schedule runs it.

    Fields:
        makers: the maker in forward of each storage that can be made again, and `OUTSIDE` of others that
            blocks read or ask for.
        nbytes: bytes of each storage.
        requests: the values that nodes ask for, on storages with a maker.
        deaths: the last moment at which each of these storages lives where nobody holds it for backward.
        held_bytes: bytes that live at each moment without what is held for backward.
        start: the moment at which the makers have run.
    """

    makers: Mapping[int, Maker]
    nbytes: Mapping[int, int]
    requests: Sequence[Request]
    deaths: Mapping[int, int]
    held_bytes: npt.NDArray[np.int64]
    start: int

    @classmethod
    def captured(cls, graph: StepGraph, calls: Sequence[PlannedCall]) -> Backward:
        """Return backward of a captured step.

        Args:
            graph: the step.
            calls: the calls of its blocks, one for each of the graph.
        """
        made = {
            storage: maker
            for captured, call in zip(graph.calls, calls, strict=True)
            for storage, maker in _makers(graph, captured, call)
        }
        outside = {each for call in calls for each in call.outer_storages if each >= 0} - graph.gathered
        older = [(call, each) for call in calls for each in call.program.older if each >= 0]
        makers: Mapping[int, Maker] = {**dict.fromkeys(sorted(outside), OUTSIDE), **made}
        asked = (each for call in graph.calls for each in (*call.redemptions, *call.shared))
        unshared = {storage: at for storage, at in graph.unshared.items() if storage in made}
        held = graph.held_bytes.copy()
        for storage, last in unshared.items():
            held[last + 1 : graph.deaths[storage] + 1] -= graph.nbytes[storage]
        return cls(
            makers=makers,
            nbytes={
                **graph.nbytes,
                **{call.storages[each]: call.program.nbytes[each] for call, each in older},
            },
            requests=[
                Request(storage=each.storage, moment=each.moment, until=each.until)
                for each in asked
                if each.storage in makers
            ],
            deaths={
                **graph.deaths,
                **unshared,
                **{call.storages[each]: call.deaths[each] for call, each in older},
            },
            held_bytes=held,
            start=max((call.end for call in calls), default=0),
        )


class AutogradBound:
    """Bounds for one step.

    Args:
        backward: its backward.

    Attributes:
        minimum_bytes: a peak that every schedule reaches.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self._recomputation = Recomputation(backward.makers, backward.nbytes)
        held: dict[int, list[tuple[int, int]]] = {}
        for each in backward.requests:
            held.setdefault(each.storage, []).append((each.moment + 1, each.until))
        self._there_bytes = backward.held_bytes + self._bytes_over_time(held)
        for each in backward.requests:
            held[each.storage].append((0, each.moment))
        self._most_bytes = backward.held_bytes + self._bytes_over_time(held)
        self.minimum_bytes = int(self._there_bytes.max())
        self._moments, self._spread = self._chosen()

    def cost(self, budget_bytes: int, host_bytes: int = 0) -> float:
        """Return the least FLOPs of what runs again within a budget; endless where no schedule keeps it.

        Args:
            budget_bytes: most bytes on the device.
            host_bytes: most bytes on the host.
        """
        if self.minimum_bytes > budget_bytes:
            return np.inf
        return self._recomputation.highest(self._moments, budget_bytes + host_bytes, whole=_WHOLE)

    def jointly(
        self, budget_bytes: int, host_bytes: int = 0, *, enough: float = np.inf, near: float = np.inf
    ) -> float:
        """Return the least FLOPs by several moments together; 0 where that proves nothing more than `cost`.

        Args:
            budget_bytes, host_bytes: as of `cost`.
            enough: what need not be exceeded.
            near: what is worth no search among the peaks of backward, which takes seconds.
        """
        if self.minimum_bytes > budget_bytes:
            return np.inf
        if len(self._backward.makers) > _MOST_TOGETHER:
            return 0.0
        room = budget_bytes + host_bytes
        highest = 0.0
        for moments in self._growing(room):
            if highest >= enough:
                break
            highest = max(
                highest, self._together(moments, room), self._together(moments, room, is_whole=True)
            )
        for moments in self._peaks():
            if highest >= near:
                break
            highest = max(highest, self._together(moments, room, is_whole=True))
        return highest

    def _peaks(self) -> Iterator[Sequence[Moment]]:
        """Yield the moments at which the most is there, each in a part of backward such as that of a block.

        First the highest peaks, then two more each time.
        """
        start = self._backward.start
        peaks = _prominences(self._there_bytes[start:].tolist())
        order = [start + each for each in sorted(peaks, key=peaks.__getitem__, reverse=True)]
        least = _PROMINENT * max(peaks.values(), default=0)
        first = sum(prominence >= least for prominence in peaks.values())
        for count in range(first, min(first + _MORE_PEAKS, len(order)) + 1, 2):
            yield [self._moment(each, int(self._there_bytes[each])) for each in order[:count]]

    def _growing(self, room_bytes: int) -> Iterator[Sequence[Moment]]:
        """Yield the dearest moment with others, one more each time, that cost more together."""
        most = self._recomputation.unknowns + _MOST_UNKNOWNS
        alone = [self._recomputation.least([each], room_bytes) for each in self._moments]
        if not alone:
            return
        chosen = [self._moments[int(np.argmax(alone))]]
        least = max(alone)
        others = {each.at: each for each in self._spread if each.at != chosen[0].at}
        costs: dict[int, float] = {}
        for at in [*others][::2] + [*others][1::2]:
            if self._recomputation.unknowns > most:
                break
            costs[at] = self._together([*chosen, others[at]], room_bytes)
        for at in sorted(costs, key=costs.__getitem__, reverse=True):
            cost = self._together([*chosen, others[at]], room_bytes)
            if cost > least * _MORE:
                chosen, least = [*chosen, others[at]], cost
                yield chosen
            if len(chosen) > _TOGETHER or self._recomputation.unknowns > most:
                return

    def _together(self, moments: Sequence[Moment], room_bytes: int, *, is_whole: bool = False) -> float:
        """Return the least cost at several moments."""
        ordered = sorted(moments, key=attrgetter("at"))
        windows = [self._until(each, then.at) for each, then in pairwise(ordered)]
        return self._recomputation.least([*windows, ordered[-1]], room_bytes, is_whole=is_whole)

    def _until(self, moment: Moment, end: int) -> Moment:
        """Return a moment with what is asked for before another one."""
        asked = (each.storage for each in self._backward.requests if moment.at <= each.moment < end)
        return replace(moment, soon=frozenset(asked))

    def _bytes_over_time(self, spans: Mapping[int, Iterable[tuple[int, int]]]) -> npt.NDArray[np.int64]:
        """Return the bytes of storages at each moment, each in its spans and after its own life.

        Args:
            spans: first and last moments of each storage; where they overlap, it counts once.
        """
        changes = np.zeros(len(self._backward.held_bytes) + 1, dtype=np.int64)
        for storage, each in spans.items():
            free = self._backward.deaths[storage] + 1
            for first, last in sorted(each):
                if max(first, free) <= last:
                    changes[max(first, free)] += self._backward.nbytes[storage]
                    changes[last + 1] -= self._backward.nbytes[storage]
                    free = last + 1
        return np.cumsum(changes)[:-1]

    def _chosen(self) -> tuple[list[Moment], list[Moment]]:
        """Return the moments of backward at which the most bytes are there or wanted, and some of all parts.

        Between two changes of what is there and wanted, that moment counts at which the most is there. So it
        does in each part of backward.
        """
        start = self._backward.start
        changes = {start, *(self._backward.deaths[storage] + 1 for storage in self._backward.makers)}
        changes.update(at for each in self._backward.requests for at in (each.moment + 1, each.until + 1))
        starts = np.array(sorted(at for at in changes if start <= at < len(self._there_bytes)))
        if not self._backward.requests or not len(starts):
            return [], []
        there, most = (np.maximum.reduceat(each, starts) for each in (self._there_bytes, self._most_bytes))
        highest = np.argsort(-most, kind="stable")[:_TRIED]
        parts = [each for each in np.array_split(np.arange(len(starts)), _PARTS) if len(each)]
        fullest = [int(each[there[each].argmax()]) for each in parts]
        moments = {at: self._moment(int(starts[at]), int(there[at])) for at in {*map(int, highest), *fullest}}
        return [moments[int(at)] for at in highest], [moments[at] for at in fullest]

    def _moment(self, moment: int, held_bytes: int) -> Moment:
        alive = {storage for storage in self._backward.makers if moment <= self._backward.deaths[storage]}
        return Moment(
            there=frozenset(
                alive.union(
                    each.storage for each in self._backward.requests if each.moment < moment <= each.until
                )
            ),
            wanted=frozenset(each.storage for each in self._backward.requests if each.moment >= moment),
            held_bytes=held_bytes,
            at=moment,
        )


def _makers(graph: StepGraph, captured: BlockCall, call: PlannedCall) -> Iterator[tuple[int, Maker]]:
    """Yield the storages that a call makes, each with what makes it."""
    operators = [graph.operators[index] for index in captured.operators]
    for unit in call.program.units:
        maker = _maker(unit, operators, call)
        yield from ((call.storages[storage], maker) for storage in unit.makes)


def _maker(unit: Unit, operators: Sequence[StepOperator], call: PlannedCall) -> Maker:
    """Return what makes the storages of a unit: all of it, or its first where forward itself goes backward.

    What is from outside, and written over later, is there for it.
    """
    program = call.program
    if program.pinned.isdisjoint(unit.makes):
        read = (each for each in unit.reads if each >= 0 or each not in program.older)
        return Maker(reads=frozenset(map(call.number_of, read)), cost=unit.flops)
    first = operators[unit.operators[0]]
    return Maker(reads=first.reads, cost=first.flops)


def _prominences(heights: Sequence[int]) -> dict[int, int]:
    """Return how far each peak rises above the way to a higher one, by its place.

    Its place is the middle of equal heights. Outside of `heights` all is 0, so that an end can be a peak.
    `scipy.signal` finds the same, and to import it takes half a second.
    """
    runs = [(0, 1), *((height, len(list(equal))) for height, equal in groupby(heights)), (0, 1)]
    levels = [height for height, _ in runs]
    lowest = map(max, _lowest_before(levels), reversed(_lowest_before(levels[::-1])))
    found, place = {}, -1
    for (height, count), low in zip(runs, lowest, strict=True):
        if low < height:
            found[place + (count - 1) // 2] = height - low
        place += count
    return found


def _lowest_before(heights: Sequence[int]) -> list[int]:
    """Return for each height the lowest one since there was a higher one, itself among them."""
    found: list[int] = []
    rising: list[tuple[int, int]] = []  # heights, each lower than the one before it, with what is found of it
    for height in heights:
        lowest = height
        while rising and rising[-1][0] <= height:
            lowest = min(lowest, rising.pop()[1])
        rising.append((height, lowest))
        found.append(lowest)
    return found
