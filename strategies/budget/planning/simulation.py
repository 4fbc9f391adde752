"""The bytes and the work of a plan, moment by moment, as its executor runs (see `plan`).

A call runs its units for the requests of backward. A member of a group runs some of them before, in the
*second forward* of its group (see `group_simulation`): what it keeps is there from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import and_, itemgetter, or_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import BlockProgram, PlannedCall
from strategies.budget.planning.schedules import Fates, Request, Schedules, Sets, columns_of, join
from strategies.budget.planning.units import UnitStep
from strategies.estimate.machine import MACHINES, Machine
from strategies.step.step_graph import StepGraph

RANDOM_STATE_BYTES = {"cpu": 5056}
"""Bytes on the device of the state of its generators, by its type; that of a GPU lies on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The fate of each storage of one block, by its number in the block's program.

    Fields:
        keep: storages that stay on the device.
        offload: storages that wait on the host; inputs of the block may be among them.
        again: storages that are made anew for each request that needs them, and dropped after it.
        drops: storages that are dropped after so many requests that need them, and made again for the next;
            one that is dropped several times comes with each number.
        is_plain: whether the block runs untouched.
        is_rerun: whether its forward runs again as a whole, without a tape (see `rerun`).
    """

    keep: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    drops: frozenset[tuple[int, int]] = frozenset()
    is_plain: bool = False
    is_rerun: bool = False

    @property
    def has_tape(self) -> bool:
        """True if a tape follows the block: it runs neither untouched nor again as a whole."""
        return not (self.is_plain or self.is_rerun)

    @property
    def resident(self) -> frozenset[int]:
        """The storages that are not recomputed."""
        return self.keep | self.offload

    def to_list(self) -> list[Any]:
        """Return the decision as JSON values."""
        sets = map(sorted, (self.keep, self.offload, self.again))
        return [*sets, sorted(self.drops), self.is_plain, self.is_rerun]

    @classmethod
    def from_list(cls, held: Sequence[Any]) -> Decision:
        """Return the decision that `to_list` gave."""
        keep, offload, again = map(frozenset, held[:3])
        drops = frozenset(map(tuple, held[3]))
        return cls(keep=keep, offload=offload, again=again, drops=drops, is_plain=held[4], is_rerun=held[5])


PLAIN, RERUN = Decision(is_plain=True), Decision(is_rerun=True)


class Work(NamedTuple):
    """Work beyond the plain step: FLOPs, and seconds with those of waiting."""

    flops: int
    seconds: float


@dataclass(kw_only=True, slots=True)
class Effect:
    """The changes that a decision makes in one call of a block, or all decisions of a group in its calls.

    Fields:
        gains: bytes more from a moment on, by moment; those of the second forward of a group are apart.
        peaks: bytes more than at that moment, reached by what runs between it and the next, by moment.
        flops, seconds: work of what runs again; seconds with `wait_s`.
        wait_s: seconds of waiting for copies to the host and back, by the machine's numbers.
        runs: units that run again, each as often as it does.
        host_bytes: bytes that wait on the host.
        second_runs: units that the second forward of a group runs.
        second_peak_bytes: most bytes that they add while they run.
        second_bytes: bytes that there are more after them.
        linked_bytes: bytes of what the call reads of the call before in its group, and is made again.
        inputs: last moments without and with the effect, and bytes, of storages that a checkpoint holds as
            inputs, by their numbers in the step. `gains` has them; `totals_of` counts each once.
        holds: last moments of storages that the call holds longer than the step, by their numbers in it.
    """

    gains: Counter[int] = field(default_factory=Counter)
    peaks: dict[int, int] = field(default_factory=dict)
    flops: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    runs: tuple[int, ...] = ()
    host_bytes: int = 0
    second_runs: tuple[int, ...] = ()
    second_peak_bytes: int = 0
    second_bytes: int = 0
    linked_bytes: int = 0
    inputs: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    holds: Mapping[int, int] = field(default_factory=dict)

    @property
    def work(self) -> Work:
        """Its work."""
        return Work(self.flops, self.seconds)

    def most_bytes(self, start: int, end: int) -> int:
        """Return the most bytes that the effect adds at the moments from `start` to `end`."""
        running = sum(gain for moment, gain in self.gains.items() if moment <= start)
        most = running
        for moment in sorted(moment for moment in self.gains if start < moment <= end):
            running += self.gains[moment]
            most = max(most, running)
        return most


def effect_of(
    call: PlannedCall, decision: Decision, *, random_state_bytes: int, machine: Machine = MACHINES["cpu"]
) -> Effect:
    """Return what a decision changes.

    Args:
        call: the call.
        decision: the decision.
        random_state_bytes: bytes on the device of the state of a random operator.
        machine: tells how long copies to the host and back take.
    """
    return Simulation(schedules_of(call, decision), random_state_bytes, machine=machine).effect(0)


def schedules_of(call: PlannedCall, decision: Decision) -> Schedules:
    """Return when what happens under a decision."""
    if decision.is_plain:
        kept = call.program.runs.bits_of(call.program.saved.union(call.dropped))
        return Schedules(call, [Fates(kept, 0, 0)], is_plain=True)
    return Schedules(call, [fates_of(call.program, decision)])


def fates_of(program: BlockProgram, decision: Decision) -> Fates:
    """Return a decision as bits."""
    sets = decision.keep, decision.offload, decision.again
    keep, moved, again = map(program.runs.bits_of, sets)
    return Fates(keep, moved, again, decision.drops)


def decision_of(program: BlockProgram, fates: Fates) -> Decision:
    """Return the decision that is not plain, without drops of what is made anew for each request anyway."""
    sets = map(program.runs.storages_in, (fates.keep, fates.moved, fates.again))
    keep, moved, again = map(frozenset, sets)
    return Decision(keep=keep, offload=moved, again=again, drops=fates.without_idle_drops().drops)


def joined(effects: Sequence[Effect]) -> Effect:
    """Return the effect of one decision in several calls of a block, in different windows of the step."""
    found = Effect(runs=effects[0].runs)
    for each in effects:
        found.gains.update(each.gains)
        found.peaks |= each.peaks
        found.flops += each.flops
        found.seconds += each.seconds
    return found


def peak_bytes(graph: StepGraph, effects: Sequence[Effect]) -> int:
    """Return the highest total of the step with all effects."""
    totals = totals_of(graph, effects)
    within = [totals[moment] + peak for effect in effects for moment, peak in effect.peaks.items()]
    return int(max(totals.max(), *within)) if within else int(totals.max())


def totals_of(graph: StepGraph, effects: Sequence[Effect]) -> npt.NDArray[np.int64]:
    """Return the bytes that live at each moment with all effects."""
    gains = np.zeros(len(graph.held_bytes) + 1, dtype=np.int64)
    for effect in effects:
        moments = np.fromiter(effect.gains.keys(), dtype=np.int64, count=len(effect.gains))
        added = np.fromiter(effect.gains.values(), dtype=np.int64, count=len(effect.gains))
        np.add.at(gains, np.minimum(moments, len(gains) - 1), added)
    known: dict[int, int] = {}  # until when each input is held
    for storage, (death, until, nbytes) in (each for effect in effects for each in effect.inputs.items()):
        if storage in known:  # counted twice until the earlier moment
            gains[death + 1] -= nbytes
            gains[min(until, known[storage]) + 1] += nbytes
        known[storage] = max(until, known.get(storage, until))
    return graph.held_bytes + np.cumsum(gains)[:-1]


class Window(NamedTuple):
    """Moments of the step in a row.

    Fields:
        start: the first moment.
        held: bytes that are held from each of them on, beyond those at the first.
    """

    start: int
    held: npt.NDArray[np.int64]

    @property
    def end(self) -> int:
        """The moment behind the last one."""
        return self.start + len(self.held)

    def base(self, times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the most bytes held from each of some points in the window to the one behind.

        Points between moments are of the moment before.
        """
        moments = times // 2 - self.start
        found = self.held[moments]
        is_even = times % 2 == 0
        found[is_even] = np.maximum.reduceat(self.held, moments[is_even])
        return found


class Highest(NamedTuple):
    """The bytes of some decisions in windows of the step, each beyond those at the window's beginning.

    Fields:
        forward: highest total of forward.
        left: bytes that wait for backward.
        backward: highest total of backward.
    """

    forward: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    backward: npt.NDArray[np.int64]


_Row: TypeAlias = tuple[int, int, int, int]
"""Bytes more from a point of time on, under some decisions.

The point is twice the moment at which they are there; one more of what happens between it and the next. Then
come the bytes, the decisions, and bytes on top of all that are there then, only at this point; -1 where the
total there counts for nothing.
"""


def highest(effect: Effect, forward: Window, backward: Window) -> Highest:
    """Return the highest totals of one effect in the windows of forward and backward."""
    rows = [(2 * moment, gain, 1, -1) for moment, gain in effect.gains.items()]
    for moment, peak in effect.peaks.items():
        rows += [(2 * moment + 1, 0, 1, peak), *_around(moment)]
    return _highest(rows, 1, forward, backward)


def _highest(rows: Sequence[_Row], count: int, forward: Window, backward: Window) -> Highest:
    last = backward.start - 1  # `backward` has the first moment of backward
    left = min(forward.end, last)
    ends = (forward.start, forward.end, left, last + 1, backward.end)
    ordered = sorted((*rows, *((2 * moment, 0, 0, -1) for moment in ends)), key=itemgetter(0))
    time, nbytes, extra = (np.array([row[place] for row in ordered]) for place in (0, 1, 3))
    # a row of bytes for each decision: sums along rows are several times as fast as those down columns
    ran = np.ascontiguousarray(columns_of([row[2] for row in ordered], count).T)
    is_last = np.append(time[1:] != time[:-1], True)
    counts = np.flatnonzero(np.where(time % 2, extra >= 0, is_last))
    totals = np.multiply(ran, nbytes, dtype=np.int64)
    totals = np.cumsum(totals, axis=1, out=totals)[:, counts]
    time = time[counts]
    peaks = totals + np.multiply(ran[:, counts], np.maximum(extra[counts], 0), dtype=np.int64)

    def between(start: int, end: int) -> slice:
        return slice(*np.searchsorted(time, (2 * start, 2 * end)))

    def most(window: Window) -> npt.NDArray[np.int64]:
        here = between(window.start, window.end)
        found: npt.NDArray[np.int64] = (peaks[:, here] + window.base(time[here])).max(axis=1, initial=0)
        return found

    waits = between(left, last + 1)
    return Highest(most(forward), totals[:, waits][:, time[waits] % 2 == 0].max(axis=1), most(backward))


def _around(moment: int) -> Sequence[_Row]:
    """Return nothing at a moment and at the next one: what is held from each of them on counts alone."""
    return (2 * moment, 0, 0, -1), (2 * moment + 2, 0, 0, -1)


class _Running(NamedTuple):
    """Units that run one after the other, and what becomes of storages meanwhile, each with its decisions.

    Fields:
        units: the units.
        stays: what they make and is not freed as soon as it is made.
        freed: storages that are freed when the last of these units has read them.
        fetched: storages that come from the host, for the first unit that reads them or else at the end.
        stashed: units that run once more, so that states of generators stay for them.
    """

    units: Sets
    stays: Sets
    freed: Sets
    fetched: Sets
    stashed: Sets


class Simulation:
    """The effects of some decisions about a call, side by side.

    Args:
        schedules: when what happens.
        random_state_bytes: bytes on the device of the state of a random operator.
        owned: storages from outside that no other block holds longer; `None`: all.
        machine: tells how long copies to the host and back take.
        taped_s: seconds that it takes to follow the operators of the call.

    Attributes:
        flops, seconds: work of what runs again; seconds with `wait_s` and `taped_s`.
        wait_s: seconds of waiting for copies to the host and back.
        units: number of units that run again, each as often as it does.
        host_bytes: bytes that wait on the host.
        second_peak_bytes, second_bytes: as of `Effect`.
    """

    def __init__(
        self,
        schedules: Schedules,
        random_state_bytes: int,
        *,
        owned: frozenset[int] | None = None,
        machine: Machine = MACHINES["cpu"],
        taped_s: float = 0.0,
    ) -> None:
        self._schedules, self._call, self._program = schedules, schedules.call, schedules.call.program
        self._sizes, self._deaths = self._program.sizes, self._call.all_deaths
        self._state_bytes, self._owned = random_state_bytes, owned
        schedules.follow()
        everyone = schedules.everyone
        self._rows = [(2 * moment, gain, everyone, -1) for moment, gain in self._call.gains]
        self._holds: list[tuple[int, int, int]] = []  # storages, last moments and decisions
        self._held: Sets = {}
        self._later: Sets = {}
        self._freed: Sets = {}
        for storage in schedules.held.keys() | schedules.read.keys():
            self._keep(storage)
        self._hold_until_end()
        if schedules.has_tape and (self._program.random_units or self._call.passing):
            self._hold_operators()
        self._second = list(self._run_second()) if schedules.second is not None else []
        drawn = Sets()  # random units that run for a later request
        for request in reversed(schedules.requests.values()):
            if request.units or request.fetched:
                self._run_request(request, drawn)
                join(drawn, {unit: request.units.get(unit, 0) for unit in self._program.random_units})
        for until, storage, among in schedules.released:
            self._gain(until + 1, -self._sizes[storage], among)
        self._count_work()
        self._move(machine)
        self.seconds += taped_s
        self.second_peak_bytes, self.second_bytes = self._followed(self._second)

    def highest(self, forward: Window, backward: Window) -> Highest:
        """Return the highest totals of decisions in the windows of forward and backward."""
        return _highest(self._rows, self._schedules.count, forward, backward)

    def effect(self, number: int) -> Effect:
        """Return what one of the decisions changes."""
        gains, peaks = Counter[int](), dict[int, int]()
        own = (row for row in self._rows if row[2] >> number & 1)
        for at, rows in groupby(own, key=itemgetter(0)):
            moment, is_between = divmod(at, 2)
            if not is_between:
                gains[moment] += sum(row[1] for row in rows)
                continue
            live = peak = 0
            for _, nbytes, _, private in rows:
                live += nbytes
                peak = max(peak, live + private)
            peaks[moment] = max(peak, live)
            gains[moment + 1] += live
        schedules = self._schedules
        number_of = self._call.number_of
        return Effect(
            gains=gains,
            peaks=peaks,
            flops=int(self.flops[number]),
            seconds=float(self.seconds[number]),
            wait_s=self.wait_s[number],
            runs=tuple(sorted(unit for unit, among in self._again if among >> number & 1)),
            host_bytes=int(self.host_bytes[number]),
            second_runs=tuple(unit for unit, among in schedules.second_units.items() if among >> number & 1),
            second_peak_bytes=int(self.second_peak_bytes[number]),
            second_bytes=int(self.second_bytes[number]),
            linked_bytes=sum(self._sizes[link] for link in schedules.links),
            holds={number_of(each): last for each, last, among in self._holds if among >> number & 1},
        )

    def _gain(self, moment: int, nbytes: int, among: int) -> None:
        if among and nbytes:
            self._rows.append((2 * moment, nbytes, among, -1))

    def _keep(self, storage: int) -> None:
        """Enter under which decisions a storage lives longer than unplanned, and who sets it free."""
        schedules, size, death = self._schedules, self._sizes[storage], self._deaths[storage]
        is_outer = storage < 0 and storage not in schedules.links
        is_owned = storage >= 0 or self._owned is None or storage in self._owned
        # there from forward on, without a link, the host or a unit
        there = schedules.resident[storage] | (~schedules.moved[storage] if is_outer else 0)
        for last, among, is_node in schedules.last(storage):
            self._later[storage] = self._later.get(storage, 0) | among & ~schedules.there[storage]
            ending = 0 if storage in schedules.outs else among & ~there
            if last > death and is_owned and (held := among & there):
                self._held[storage] = self._held.get(storage, 0) | held
                self._holds.append((storage, last, held))
                self._gain(death + 1, size, held)
                ending |= held
            if is_node:  # this call is the last to have it
                self._gain(last + 1, -size, ending)
            else:
                self._freed[storage] = self._freed.get(storage, 0) | ending

    def _hold_until_end(self) -> None:
        """Enter what is held until forward ends, whoever reads it."""
        schedules, end, count = self._schedules, self._call.end, len(self._sizes)
        for place in range(count if schedules.second is None and schedules.has_tape else 0):
            storage = place if place < len(self._program.nbytes) else place - count
            among = schedules.resident[place] | schedules.moved[place]
            if among and self._deaths[place] < end:
                among &= ~self._held.get(storage, 0)
                self._gain(self._deaths[place] + 1, self._sizes[place], among)
                self._gain(end + 1, -self._sizes[place], among)

    def _hold_operators(self) -> None:
        """Enter what the tape holds for operators in forward, as it does while it knows no order of them.

        They are states of generators, and what was read from outside and dies meanwhile.
        """
        call, schedules, units = self._call, self._schedules, self._program.units
        held = [
            (schedules.resident[each] | schedules.moved[each]) & ~schedules.dropping.get(each, 0)
            for each in range(len(self._program.nbytes))
        ]
        taped = [schedules.everyone & ~reduce(and_, (held[s] for s in unit.makes)) for unit in units]
        until = self._taped_until(held, taped)
        for unit in self._program.random_units:
            stash = units[unit].random_states * self._state_bytes
            self._gain(call.starts[unit] + 1, stash, taped[unit])
            ran = reduce(or_, (each.units.get(unit, 0) for each in schedules.requests.values()), 0)
            unneeded = taped[unit] & ~(ran | schedules.second_units.get(unit, 0))
            for end, among in until[unit].items():
                self._gain(end + 1, -stash, unneeded & among)
        left = {storage: schedules.everyone & ~self._held.get(storage, 0) for _, storage in call.passing}
        for end in sorted({end for unit, _ in call.passing for end in until[unit]}, reverse=True):
            for unit, storage in call.passing:  # the latest alone counts
                passing = left[storage] & taped[unit] & until[unit].get(end, 0)
                left[storage] ^= passing
                if self._deaths[storage] < end:
                    self._gain(self._deaths[storage] + 1, self._sizes[storage], passing)
                    self._gain(end + 1, -self._sizes[storage], passing)

    def _taped_until(self, held: Sequence[int], taped: Sequence[int]) -> list[Sets]:
        """Return until when a tape has each unit that nothing asks for, with the decisions.

        That of a chain lets go, when one of its blocks ends, of what nobody reads any more.

        Args:
            held: decisions under which no tape has the maker of a storage, by storage.
            taped: decisions under which a tape has a unit, by unit.
        """
        call, everyone, ends = self._call, self._schedules.everyone, self._call.ends or (self._call.end,)

        def reached(moment: int) -> list[int]:
            """Return of each block under which decisions something at a moment is in it or in a later one."""
            return [everyone, *(everyone if moment >= end else 0 for end in ends[:-1])]

        latest = list(map(reached, call.deaths))  # of what follows from a storage, too
        found: list[Sets] = []
        units = zip(self._program.units, call.starts, taped, strict=True)
        for unit, start, among in reversed(list(units)):
            own = reached(start)
            for storage in unit.makes:
                own = [a | b & ~held[storage] for a, b in zip(own, latest[storage], strict=True)]
            for storage in unit.reads if len(ends) > 1 else ():
                if storage >= 0:
                    latest[storage] = [a | b & among for a, b in zip(latest[storage], own, strict=True)]
            later = [*own[1:], 0]
            found.append({end: a & ~b for end, a, b in zip(ends, own, later, strict=True) if a & ~b})
        return found[::-1]

    def _run_second(self) -> Iterator[_Row]:
        """Follow the bytes of the second forward: what is made on the way there dies with its last reader."""
        schedules = self._schedules
        read_later, stashed = Sets(), Sets()
        for request in schedules.requests.values():
            join(read_later, request.reads)
            join(stashed, request.units)
        units, reads, there = schedules.second_units, schedules.second_reads, schedules.there
        makes = {s: among for unit, among in units.items() for s in self._program.units[unit].makes}
        freed = {s: among & ~read_later.get(s, 0) for s, among in self._freed.items()}
        join(freed, {s: among & ~there[s] for s, among in makes.items()})
        stays = {s: there[s] | reads.get(s, 0) for s in makes}
        yield from self._run(0, _Running(units, stays, freed, {}, stashed))

    def _run_request(self, request: Request, stashed: Sets) -> None:
        """Follow the bytes while the units of a request run, between its moment and the next.

        Args:
            request: the request.
            stashed: as of `_Running`.
        """
        copied, later, freed = self._schedules.copied, self._later, self._freed
        stays = {
            each: among & (later.get(each, 0) | copied.get(each, 0)) for each, among in request.made.items()
        }
        ending = {
            each: among & (freed.get(each, 0) | copied.get(each, 0))
            for each, among in request.last_read.items()
        }
        at = 2 * request.moment + 1
        self._rows += self._run(at, _Running(request.units, stays, ending, request.fetched, stashed))
        self._rows += _around(request.moment)

    def _run(self, at: int, running: _Running) -> Iterator[_Row]:
        """Yield the bytes while units run, at a point of time."""
        units, stays, freed, fetched, stashed = running
        sizes, waiting = self._sizes, dict(fetched)
        for step, unit, first_reads, ended in self._steps(units, freed):
            among = units[unit]
            for storage in first_reads if waiting else ():
                if here := waiting.get(storage, 0) & among:
                    waiting[storage] ^= here
                    yield at, sizes[storage], here, -1
            state_bytes = step.random_states * self._state_bytes
            private_bytes = step.private_bytes + (self._state_bytes if step.random_states else 0)
            # the memory of what it writes over becomes that of what it makes
            yield from self._ended(at, (each for each in ended if each[0] in step.over))
            yield at, step.made_bytes, among, private_bytes
            if state_bytes:
                yield at, -state_bytes, among & ~stashed.get(unit, 0), -1
            for storage in step.made:
                if superfluous := among & ~stays.get(storage, 0):
                    yield at, -sizes[storage], superfluous, -1
            yield from self._ended(at, (each for each in ended if each[0] not in step.over))
        for storage, among in waiting.items():
            if among:
                yield at, sizes[storage], among, 0

    def _ended(self, at: int, ended: Iterable[tuple[int, int]]) -> Iterator[_Row]:
        """Yield that storages are freed, each with its decisions."""
        yield from ((at, -self._sizes[storage], among, -1) for storage, among in ended)

    def _steps(
        self, units: Sets, freed: Sets
    ) -> Iterator[tuple[UnitStep, int, Sequence[int], list[tuple[int, int]]]]:
        """Yield each operator of units in order, its unit, and what this reads if the operator is its first.

        With them what is freed behind the operator, because none of these operators reads it later.
        """
        program = self._program.units
        steps = [
            (step, unit, () if number else program[unit].reads)
            for unit in units
            for number, step in enumerate(program[unit].steps)
        ]
        if len(steps) > len(units):
            steps.sort(key=lambda each: each[0].ordinal)
        left, found = dict(freed), []
        for step, unit, first_reads in reversed(steps):
            ended = []
            for storage in step.reads:
                if here := left.get(storage, 0) & units[unit]:
                    left[storage] ^= here
                    ended.append((storage, here))
            found.append((step, unit, first_reads, ended))
        return reversed(found)

    def _followed(self, rows: Sequence[_Row]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the most bytes while units run and those at their end, by decision."""
        if not rows:
            return (np.zeros(self._schedules.count, dtype=np.int64),) * 2
        _, nbytes, among, private = zip(*rows, strict=True)
        ran, extra = columns_of(among, self._schedules.count), np.array(private)
        totals = np.cumsum(ran * np.array(nbytes)[:, None], axis=0)
        peaks = totals + ran * extra[:, None]
        return np.maximum(peaks[extra >= 0].max(axis=0), 0), totals[-1]

    def _count_work(self) -> None:
        """Count what runs again, in the order of the units, the second forward first."""
        schedules, units = self._schedules, self._program.units
        requests = schedules.requests.values()
        self._again = sorted(pair for request in requests for pair in request.units.items())
        ran = [*schedules.second_units.items(), *self._again]
        if not ran:
            self.flops = self.units = np.zeros(schedules.count, dtype=np.int64)
            self.seconds = np.zeros(schedules.count)
            return
        columns = columns_of([among for _, among in ran], schedules.count)
        self.units = columns[len(schedules.second_units) :].sum(axis=0, dtype=np.int64)
        self.flops = (columns * np.array([units[unit].flops for unit, _ in ran])[:, None]).sum(axis=0)
        # one after the other, as those of one decision
        seconds = columns * np.array([units[unit].seconds for unit, _ in ran])[:, None]
        self.seconds = np.cumsum(seconds, axis=0)[-1]

    def _move(self, machine: Machine) -> None:
        """Count what waits on the host: what comes back, and what results have saved that die after forward.

        Nobody goes on with such results: what their nodes have saved is copied first.
        """
        schedules, call, moved = self._schedules, self._call, Sets()
        for request in schedules.requests.values():
            join(moved, request.fetched)
        join(moved, {s: schedules.moved[s] for s, until in call.dropped.items() if until >= call.end})
        rows = [(self._sizes[storage], among) for storage, among in moved.items()]
        self.wait_s = [0.0] * schedules.count
        self.host_bytes = np.zeros(schedules.count, dtype=np.int64)
        if rows:
            nbytes, among = zip(*rows, strict=True)
            self.host_bytes = (columns_of(among, schedules.count) * np.array(nbytes)[:, None]).sum(axis=0)
        window_s = sum(unit.seconds for unit in self._program.units)
        for number in map(int, np.flatnonzero(self.host_bytes)):
            self.wait_s[number] = machine.offload_s(int(self.host_bytes[number]), window_s)
            self.seconds[number] += self.wait_s[number]
