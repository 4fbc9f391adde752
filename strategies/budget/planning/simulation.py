"""The bytes and the work of a plan, moment by moment, as its executor runs (see `plan`).

A call runs its units for the requests of backward. A member of a group runs some of them before, in the
*second forward* of its group (see `group_simulation`): what it keeps is there from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.units import Run
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
    schedule = Schedule.of(call, decision)
    effect = effect_of_schedule(schedule, random_state_bytes)
    runs = call.program.runs
    # results that nobody goes on with die after forward: what their nodes have saved is copied first
    lingering = (each for each in decision.offload if call.dropped.get(each, -1) >= call.end)
    effect.host_bytes = runs.bytes_of(reduce(or_, schedule.fetched.values(), runs.bits_of(lingering)))
    if effect.host_bytes:
        window_s = sum(unit.seconds for unit in call.program.units)
        effect.wait_s = machine.offload_s(effect.host_bytes, window_s)
        effect.seconds += effect.wait_s
    return effect


def effect_of_schedule(
    schedule: Schedule, random_state_bytes: int, owned: frozenset[int] | None = None
) -> Effect:
    """Return what changes when a call runs as scheduled, but for copies to the host.

    Args:
        schedule: when what happens.
        random_state_bytes: bytes on the device of the state of a random operator.
        owned: storages from outside that no other block holds longer; `None`: all.
    """
    return _Walk(schedule, random_state_bytes, owned).effect


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


@dataclass(kw_only=True, slots=True)
class Schedule:
    """When what happens under a decision.

    Fields:
        call: the call.
        links: storages from outside that the member before makes, in a group.
        outs: storages that the next member reads.
        moved: storages that wait on the host.
        again: storages that live for one request.
        drops: storages that are dropped after so many requests that need them.
        resident: storages on the device from forward on.
        there: storages that requests find made: from forward or the second forward on, or on the host.
        until_end: storages that are held until forward ends, whoever reads them.
        has_tape: whether a tape follows forward.
        second: units of the second forward; none outside of groups.
        requests: what runs at requests of backward, by the request's number; of others nothing runs.
        made: what the units that run for it make, and was not there, as bits.
        last_read: what nobody reads after the request, as bits; of what is dropped, this copy.
        fetched: what comes back from the host for it, as bits.
        read_until: last moment at which a unit reads a storage.
        held_until: last moment at which a node has a storage.
        released: last moments at which a node has a copy of what is dropped, and storages.
        last: last moment at which a unit or a node has a storage; of what is dropped, the one of forward.
    """

    call: PlannedCall
    links: frozenset[int]
    outs: frozenset[int]
    moved: frozenset[int]
    again: frozenset[int]
    resident: frozenset[int]
    there: frozenset[int]
    until_end: frozenset[int]
    drops: frozenset[tuple[int, int]] = frozenset()
    has_tape: bool = True
    second: Run | None = None
    requests: dict[int, Run] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    last_read: dict[int, int] = field(default_factory=dict)
    fetched: dict[int, int] = field(default_factory=dict)
    read_until: dict[int, int] = field(default_factory=dict)
    held_until: dict[int, int] = field(default_factory=dict)
    released: list[tuple[int, int]] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, call: PlannedCall, decision: Decision) -> Schedule:
        """Return what backward asks of a call outside of groups, in order."""
        resident = call.program.saved.union(call.dropped) if decision.is_plain else decision.keep
        schedule = cls(
            call=call,
            links=frozenset(),
            outs=frozenset(),
            moved=decision.offload,
            again=decision.again,
            drops=decision.drops,
            resident=resident,
            there=resident | decision.offload,
            until_end=decision.resident,
            has_tape=not decision.is_plain,
        )
        schedule._ask()
        return schedule

    @classmethod
    def in_group(
        cls,
        call: PlannedCall,
        keep: frozenset[int],
        moment: int,
        *,
        links: frozenset[int],
        outs: frozenset[int],
    ) -> Schedule:
        """Return what backward asks of a member of a group, whose second forward is at `moment`."""
        none, runs = frozenset[int](), call.program.runs
        schedule = cls(
            call=call,
            links=links,
            outs=outs,
            moved=none,
            again=none,
            resident=none,
            there=keep | outs,
            until_end=none,
        )
        schedule._ask()
        schedule.there = outs.union(keep.intersection(schedule.last))
        there = runs.bits_of(schedule.there)
        schedule.second = second = Run(runs, runs.making(there, 0))
        for storage in runs.storages_in(second.reads & (there | runs.outside)):
            schedule.read_until.setdefault(storage, moment)
        schedule._note_last()
        return schedule

    def _ask(self) -> None:
        """Enter the requests: which units run for each, what is fetched, and until when it is held.

        What a ticket gives, nobody but the node that asked holds.
        """
        call, runs = self.call, self.call.program.runs
        self.held_until |= call.tickets_until if self.has_tape else call.graph_until
        tickets = (self.moved | self.links) if self.has_tape else frozenset[int]()
        self.held_until |= {each: call.asked_until[each] for each in tickets & call.asked_until.keys()}
        dropped = self._run()
        if self.moved:
            self._fetch()
        copied = self.copied
        unread, read_until = ~copied, self.read_until
        for index, run in reversed(self.requests.items()):
            self.last_read[index] = last_read = run.reads & unread
            unread ^= last_read
            moment = call.asked[index]
            for storage in runs.storages_in(last_read):
                read_until[storage] = moment
        if copied:
            self._end_copies(copied, dropped)
        if self.has_tape and call.program.asks_in_forward:
            self._hold_in_forward()
        self._note_last()

    @property
    def copied(self) -> int:
        """Storages that are dropped and made again, as bits."""
        return self.call.program.runs.bits_of(self.again.union(storage for storage, _ in self.drops))

    def uses(self) -> Counter[int]:
        """Return how many requests need each storage: for themselves, or for what runs."""
        runs, uses = self.call.program.runs, Counter[int]()
        for index, _, bit in self.call.program.asked_inside:
            uses.update(runs.storages_in(bit | self.requests.get(index, runs.nothing).reads))
        return uses

    def _run(self) -> dict[int, int]:
        """Enter what runs for each request; return what is dropped after it, as bits."""
        runs, uses, dropped = self.call.program.runs, Counter[int](), dict[int, int]()
        there, again, fleeting = runs.bits_of(self.there), runs.bits_of(self.again), self.copied
        last: dict[int, int] = {}
        for storage, number in self.drops:
            last[storage] = max(number, last.get(storage, 0))
        for index, storage, bit in self.call.program.asked_inside:
            used = bit
            if not there & bit:  # of most storages nothing runs again
                self.requests[index] = run = runs.run(storage, there)
                used |= run.reads
                self.made[index] = run.makes & ~there & (used | ~fleeting)
                there |= self.made[index]
            used &= fleeting
            if not used:
                continue
            dropped[index] = used & again
            for each in runs.storages_in(used & ~again):
                uses[each] += 1
                if (each, uses[each]) in self.drops:
                    dropped[index] |= runs.bits[each]
                if uses[each] == last[each]:  # the next copy stays
                    fleeting ^= runs.bits[each]
            there &= ~dropped[index]
        return dropped

    def _end_copies(self, copied: int, dropped: Mapping[int, int]) -> None:
        """Find until when each copy of what is dropped is held: by the units of a request, or by a node."""
        call, runs, nothing = self.call, self.call.program.runs, self.call.program.runs.nothing
        unused = (-1, -1)  # the last request that reads a copy, and the last moment of a node that has it
        copies = dict.fromkeys(runs.storages_in(copied), unused)
        ended: list[tuple[int, tuple[int, int]]] = []
        for index, storage, bit in call.program.asked_inside:
            for each in runs.storages_in(self.requests.get(index, nothing).reads & copied):
                copies[each] = index, copies[each][1]
            if bit & copied:
                copies[storage] = copies[storage][0], max(call.until[index], copies[storage][1])
            for each in runs.storages_in(dropped.get(index, 0)):
                ended.append((each, copies[each]))
                copies[each] = unused
        from_forward = copied & runs.bits_of(self.there)
        for storage in copies:
            self.held_until.pop(storage, None)
        for storage, (index, until) in (*ended, *(each for each in copies.items() if each[1] != unused)):
            is_read_last, bit = index >= 0 and call.asked[index] > until, runs.bits[storage]
            if is_read_last:
                self.last_read[index] |= bit
            if from_forward & bit:  # counts with what lives from forward on
                from_forward ^= bit
                self.held_until[storage] = until
                self.read_until |= {storage: call.asked[index]} if is_read_last else {}
            elif not is_read_last:
                self.released.append((until, storage))

    def _hold_in_forward(self) -> None:
        """Hold what stays, or is made again before forward ends, until then: its tape does."""
        runs, end, asked = self.call.program.runs, self.call.end, self.call.asked
        early = (made for index, made in self.made.items() if asked[index] < end)
        made = {*runs.storages_in(reduce(or_, early, 0))}
        for storage in made | self.resident.intersection(self.held_until.keys() | self.read_until.keys()):
            self.held_until[storage] = max(end, self.held_until.get(storage, -1))
        fetched = runs.storages_in(reduce(or_, self.fetched.values(), 0))
        for storage in self.moved.difference(fetched):  # nobody needs it after forward
            self.held_until.pop(storage, None)
            self.read_until.pop(storage, None)

    def _fetch(self) -> None:
        """Note the first request after forward that needs each storage on the host."""
        runs, nothing = self.call.program.runs, self.call.program.runs.nothing
        waiting = runs.bits_of(self.moved)
        for index, storage in enumerate(self.call.program.asked):
            if self.call.asked[index] < self.call.end:
                continue
            run = self.requests.get(index, nothing)
            needed = waiting & (run.reads | runs.bits[storage])
            if needed:
                self.fetched[index] = needed
                waiting &= ~needed

    def _note_last(self) -> None:
        """Find the last moment at which anybody has each storage."""
        found = dict(self.held_until)
        for storage, moment in self.read_until.items():
            if moment > found.get(storage, -1):
                found[storage] = moment
        self.last = found


class _Walk:
    """Follows the bytes of one call."""

    def __init__(self, schedule: Schedule, random_state_bytes: int, owned: frozenset[int] | None) -> None:
        self.effect = effect = Effect(gains=Counter(dict(schedule.call.gains)))
        self._schedule, self._call, self._program = schedule, schedule.call, schedule.call.program
        self._runs, self._random_state_bytes = self._program.runs, random_state_bytes
        self._sizes, self._deaths = self._program.sizes, self._call.all_deaths
        self._there = self._runs.bits_of(schedule.there)
        self._later = self._runs.bits_of(schedule.last) & ~self._there
        self._copied = schedule.copied
        self._held: set[int] = set()
        self._freed = self._kept_until(owned)
        effect.holds = {schedule.call.number_of(each): schedule.last[each] for each in self._held}
        self._hold_from_forward()
        if schedule.second is not None:
            self._run_second(schedule.second)
        self._run_requests()
        second = () if schedule.second is None else schedule.second.units
        effect.runs = tuple(sorted(unit for run in schedule.requests.values() for unit in run.units))
        work = [self._program.units[unit] for unit in (*second, *effect.runs)]
        effect.flops = sum(unit.flops for unit in work)
        effect.seconds = sum(unit.seconds for unit in work)
        effect.linked_bytes = sum(self._sizes[link] for link in schedule.links)

    def _kept_until(self, owned: frozenset[int] | None) -> int:
        """Note what lives longer than unplanned, and what nodes of autograd set free; return what units do.

        Args:
            owned: as of `effect_of_schedule`.
        """
        schedule, gains, freed = self._schedule, self.effect.gains, []
        away = schedule.moved | schedule.links
        for storage, last in schedule.last.items():
            # there from forward on, without a link, the host or a unit
            if storage in schedule.resident or (storage < 0 and storage not in away):
                if last <= self._deaths[storage] or not (owned is None or storage >= 0 or storage in owned):
                    continue
                self._held.add(storage)
            elif storage in schedule.outs:
                continue
            # this call is the last to have it
            if schedule.held_until.get(storage, -1) < last:
                freed.append(storage)
            else:
                gains[last + 1] = gains.get(last + 1, 0) - self._sizes[storage]
        return self._runs.bits_of(freed)

    def _hold_from_forward(self) -> None:
        """Enter what forward leaves: kept storages, inputs that are read again, states of generators."""
        gains, call, sizes, schedule = self.effect.gains, self._call, self._sizes, self._schedule
        for storage in self._held:
            gains[self._deaths[storage] + 1] += sizes[storage]
        for storage in schedule.until_end - self._held:
            if self._deaths[storage] < call.end:
                gains[self._deaths[storage] + 1] += sizes[storage]
                gains[call.end + 1] -= sizes[storage]
        if schedule.has_tape and (self._program.random_units or call.passing):
            self._hold_operators()

    def _hold_operators(self) -> None:
        """Enter what the tape holds for operators in forward, as it does while it knows no order of them.

        They are states of generators, and what was read from outside and dies meanwhile.
        """
        gains, call, sizes, schedule = self.effect.gains, self._call, self._sizes, self._schedule
        held = (schedule.resident | schedule.moved).difference(storage for storage, _ in schedule.drops)
        needed = {unit for run in schedule.requests.values() for unit in run.units}
        needed.update(() if schedule.second is None else schedule.second.units)
        until = call.taped_until(held)
        taped = [not held.issuperset(unit.makes) for unit in self._program.units]
        for index in filter(taped.__getitem__, self._program.random_units):
            stash = self._program.units[index].random_states * self._random_state_bytes
            gains[call.starts[index] + 1] += stash
            if index not in needed:
                gains[until[index] + 1] -= stash
        passing: dict[int, int] = {}
        for index, storage in call.passing:
            if taped[index] and storage not in self._held:
                passing[storage] = max(until[index], passing.get(storage, -1))
        for storage, end in passing.items():
            gains[self._deaths[storage] + 1] += sizes[storage]
            gains[end + 1] -= sizes[storage]

    def _run_second(self, second: Run) -> None:
        """Follow the bytes of the second forward: what is made on the way there dies with its last reader."""
        schedule, effect = self._schedule, self.effect
        read_later = reduce(or_, (run.reads for run in schedule.requests.values()), 0)
        effect.second_peak_bytes, effect.second_bytes = second.bytes_meanwhile(
            superfluous=~(self._there | second.reads),
            freed=second.makes & ~self._there | self._freed & ~read_later,
            fetched=0,
            stashed=reduce(or_, (run.bits for run in schedule.requests.values()), 0),
            random_state_bytes=self._random_state_bytes,
        )
        effect.second_runs = second.units

    def _run_requests(self) -> None:
        """Follow the bytes while the units of each request run, between its moment and the next."""
        schedule, effect = self._schedule, self.effect
        gains, peaks, runs = effect.gains, effect.peaks, self._runs
        for index in sorted(schedule.requests.keys() | schedule.fetched.keys()):
            run, moment = schedule.requests.get(index, runs.nothing), self._call.asked[index]
            stays = (self._later | self._copied) & schedule.made.get(index, 0)
            freed = (self._freed | self._copied) & schedule.last_read.get(index, 0)
            fetched = schedule.fetched.get(index, 0)
            peaks[moment], live = run.bytes_meanwhile(~stays, freed, fetched, 0, self._random_state_bytes)
            gains[moment + 1] = gains.get(moment + 1, 0) + live
        for until, storage in schedule.released:
            gains[until + 1] = gains.get(until + 1, 0) - self._sizes[storage]
