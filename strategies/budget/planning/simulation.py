"""The bytes and the work of a plan, moment by moment, as its executor runs (see `plan`).

A call runs its units for the requests of backward. A member of a group runs some of them before, in the
*second forward* of its group (see `group_simulation`): what it keeps is there from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import PlannedCall
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
        is_plain: whether the block runs untouched.
        is_rerun: whether its forward runs again as a whole, without a tape (see `rerun`).
    """

    keep: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    is_plain: bool = False
    is_rerun: bool = False

    @property
    def resident(self) -> frozenset[int]:
        """The storages that are not recomputed."""
        return self.keep | self.offload

    def to_list(self) -> list[Any]:
        """Return the decision as JSON values."""
        return [*map(sorted, (self.keep, self.offload, self.again)), self.is_plain, self.is_rerun]

    @classmethod
    def from_list(cls, held: Sequence[Any]) -> Decision:
        """Return the decision that `to_list` gave."""
        keep, offload, again = map(frozenset, held[:3])
        return cls(keep=keep, offload=offload, again=again, is_plain=held[3], is_rerun=held[4])


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
    effect = effect_of_schedule(schedule, 0 if decision.is_plain else random_state_bytes)
    effect.host_bytes = sum(map(call.program.nbytes_of, schedule.fetched_at))
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
        owned: storages from outside that no other member of the group holds longer; `None`: all.
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
        resident: storages on the device from forward on.
        there: storages that requests find made: from forward or the second forward on, or on the host.
        until_end: storages that are held until forward ends, whoever reads them.
        second: units of the second forward, in order; none outside of groups.
        requests: units that run at requests of backward, by the request's number; of others nothing runs.
        runs_at: first moment at which each unit runs for a request.
        fetched_at: moment at which each offloaded storage comes back.
        reads: storages that are at hand when units read them, as often as they are read.
        read_until: last moment at which a unit reads a storage.
        held_until: last moment at which a node has a storage.
        last: last moment at which a unit or a node has a storage, of those that live longer than a request.
    """

    call: PlannedCall
    links: frozenset[int]
    outs: frozenset[int]
    moved: frozenset[int]
    again: frozenset[int]
    resident: frozenset[int]
    there: frozenset[int]
    until_end: frozenset[int]
    second: list[int] = field(default_factory=list)
    requests: dict[int, list[int]] = field(default_factory=dict)
    runs_at: dict[int, int] = field(default_factory=dict)
    fetched_at: dict[int, int] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    read_until: dict[int, int] = field(default_factory=dict)
    held_until: dict[int, int] = field(default_factory=dict)
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
            resident=resident,
            there=resident | decision.offload,
            until_end=decision.resident,
        )
        schedule._ask(has_tickets=not decision.is_plain)
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
        none, units = frozenset[int](), call.program.units
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
        schedule._ask(has_tickets=True)
        schedule.there = outs.union(keep.intersection(schedule.last))
        schedule.second = call.program.closure(schedule.there, none, none)
        reads = [storage for unit in schedule.second for storage in units[unit].reads]
        at_hand = [storage for storage in reads if storage < 0 or storage in schedule.there]
        schedule.reads += at_hand
        schedule.read_until = dict.fromkeys(at_hand, moment) | schedule.read_until
        schedule._note_last()
        return schedule

    def _ask(self, *, has_tickets: bool) -> None:
        """Enter the requests: which units run for each, what is fetched, and until when it is held.

        What a ticket gives, nobody but the node that asked holds.
        """
        call, program = self.call, self.call.program
        self.held_until |= call.tickets_until if has_tickets else call.graph_until
        tickets = (self.moved | self.links) if has_tickets else frozenset[int]()
        self.held_until |= {each: call.asked_until[each] for each in tickets & call.asked_until.keys()}
        for index, storage in program.asked_inside:
            # of most storages nothing runs again
            maker = program.makers[storage]
            if storage in self.there or (maker in self.runs_at and storage not in self.again):
                continue
            units = program.closure([storage], self.there, self.runs_at.keys(), self.again)
            reads = [each for unit in units for each in program.units[unit].reads]
            self.reads += reads
            self.read_until |= dict.fromkeys(reads, call.asked[index])
            for unit in units:
                self.runs_at.setdefault(unit, call.asked[index])
            self.requests[index] = units
        if self.moved:
            self._fetch()
        if has_tickets and program.asks_in_forward:
            self._hold_in_forward()
        self._note_last()

    def _hold_in_forward(self) -> None:
        """Hold what stays, or is made again before forward ends, until then: its tape does."""
        units, end = self.call.program.units, self.call.end
        made = {each for unit, moment in self.runs_at.items() if moment < end for each in units[unit].makes}
        for storage in made | self.resident.intersection(self.held_until.keys() | self.read_until.keys()):
            self.held_until[storage] = max(end, self.held_until.get(storage, -1))
        for storage in self.moved - self.fetched_at.keys():  # nobody needs it after forward
            self.held_until.pop(storage, None)
            self.read_until.pop(storage, None)

    def _fetch(self) -> None:
        """Note the first request after forward that needs each storage on the host."""
        program = self.call.program
        for index, (storage, moment) in enumerate(zip(program.asked, self.call.asked, strict=True)):
            if moment < self.call.end:
                continue
            units = self.requests.get(index, [])
            for each in (*(read for unit in units for read in program.units[unit].reads), storage):
                if each in self.moved and each not in self.fetched_at:
                    self.fetched_at[each] = moment
                    self.requests[index] = units

    def _note_last(self) -> None:
        """Find the last moment at which anybody has each storage; those that live for a request have none."""
        found = dict(self.held_until)
        for storage, moment in self.read_until.items():
            if moment > found.get(storage, -1):
                found[storage] = moment
        for storage in self.again:
            found.pop(storage, None)
        self.last = found


class _Walk:
    """Follows the bytes of one call."""

    def __init__(self, schedule: Schedule, random_state_bytes: int, owned: frozenset[int] | None) -> None:
        self.effect = effect = Effect(gains=Counter(dict(schedule.call.gains)))
        self._schedule, self._call, self._program = schedule, schedule.call, schedule.call.program
        self._sizes, self._random_state_bytes = self._program.sizes, random_state_bytes
        self._deaths = self._call.all_deaths
        self._back: set[int] = set()
        self._left = Counter(schedule.reads)
        read_until, held_until, sizes = schedule.read_until, schedule.held_until, self._sizes
        last, resident, away = schedule.last, schedule.resident, schedule.moved | schedule.links
        # there from forward on, without a link, the host or a unit; held is what lives longer than unplanned
        there = {each for each in last if each in resident or (each < 0 and each not in away)}
        longer = {each for each in there if last[each] > self._deaths[each]}
        self._held = longer if owned is None else {each for each in longer if each >= 0 or each in owned}
        # what this call is the last to have: a unit, or a node of autograd, sets it free
        ours = self._held | (last.keys() - there - schedule.outs)
        by_unit = {each for each in ours if read_until.get(each, -1) > held_until.get(each, -1)}
        self._freed = {storage: sizes[storage] for storage in by_unit}
        self._later = last.keys() - schedule.there
        self._hold_from_forward()
        if schedule.second:
            self._run_second()
        self._run_requests()
        for storage in ours - by_unit:
            self.effect.gains[held_until[storage] + 1] -= sizes[storage]
        effect.runs = tuple(sorted(unit for units in schedule.requests.values() for unit in units))
        work = [self._program.units[unit] for unit in (*schedule.second, *effect.runs)]
        effect.flops = sum(unit.flops for unit in work)
        effect.seconds = sum(unit.seconds for unit in work)
        effect.linked_bytes = sum(sizes[link] for link in schedule.links)

    def _hold_from_forward(self) -> None:
        """Enter what forward leaves: kept storages, inputs that are read again, states of generators."""
        gains, call, sizes, schedule = self.effect.gains, self._call, self._sizes, self._schedule
        for storage in self._held:
            gains[self._deaths[storage] + 1] += sizes[storage]
        for storage in schedule.until_end - self._held:
            if self._deaths[storage] < call.end:
                gains[self._deaths[storage] + 1] += sizes[storage]
                gains[call.end + 1] -= sizes[storage]
        needed = schedule.runs_at.keys() | schedule.second
        for index in self._program.random_units:
            unit = self._program.units[index]
            if not (schedule.resident | schedule.moved).issuperset(unit.makes):
                stash = unit.random_states * self._random_state_bytes
                gains[call.starts[index] + 1] += stash
                if index not in needed:
                    gains[call.end + 1] -= stash

    def _run_second(self) -> None:
        """Follow the bytes of the second forward: what is made on the way there dies with its last reader."""
        schedule, effect, units = self._schedule, self.effect, self._program.units
        reads = (storage for unit in schedule.second for storage in units[unit].reads)
        passing = Counter(each for each in reads if each >= 0 and each not in schedule.there)
        effect.second_peak_bytes, effect.second_bytes = self._run(schedule.second, passing, moment=None)
        effect.second_runs = tuple(schedule.second)

    def _run_requests(self) -> None:
        """Follow the bytes while the units of each request run, between its moment and the next."""
        schedule, effect, program = self._schedule, self.effect, self._program
        for index, request in sorted(schedule.requests.items()):
            asked, moment = program.asked[index], self._call.asked[index]
            peak, live = self._run(request, self._passing(request, asked), moment=moment)
            live += self._fetched((asked,), moment)
            effect.peaks[moment] = max(peak, live)
            effect.gains[moment + 1] += live
        for index, asked in program.asked_inside if schedule.again else ():
            if asked in schedule.again:
                effect.gains[self._call.until[index] + 1] -= self._sizes[asked]

    def _passing(self, request: Sequence[int], asked: int) -> dict[int, int]:
        """Return how often a request reads each storage that lives for it alone; who asked reads it once."""
        again, units = self._schedule.again, self._program.units
        if not again:
            return {}
        reads = (storage for unit in request for storage in units[unit].reads)
        return Counter(storage for storage in (asked, *reads) if storage in again)

    def _run(self, running: Sequence[int], passing: dict[int, int], *, moment: int | None) -> tuple[int, int]:
        """Follow the bytes while units run; return the most of them, and those at the end.

        Args:
            running: the units.
            passing: how often the units read each storage that is gone at their end.
            moment: when the request for them comes; `None` for the second forward.
        """
        schedule, units, sizes = self._schedule, self._program.units, self._sizes
        steps = [(index, step) for index in running for step in units[index].steps]
        if len(steps) > len(running):
            steps.sort(key=lambda each: each[1].ordinal)
        live = peak = 0
        for index, step in steps:
            if schedule.fetched_at and step is units[index].steps[0]:
                live += self._fetched(units[index].reads, moment)
            live += step.made_bytes
            if step.random_states:
                peak = max(peak, live + step.private_bytes + self._random_state_bytes)
                if moment is not None or index not in schedule.runs_at:  # the last time that it runs
                    live -= step.random_states * self._random_state_bytes
            else:
                peak = max(peak, live + step.private_bytes)
            stays = (
                schedule.there if moment is None else self._later if schedule.runs_at[index] == moment else ()
            )
            for storage in step.made:
                if storage not in stays and storage not in passing:  # superfluous
                    live -= sizes[storage]
            live -= self._freed_by(step.reads, passing)
        return peak, live

    def _fetched(self, storages: Sequence[int], moment: int | None) -> int:
        """Return the bytes of those storages that come back from the host at this moment, once."""
        known = self._schedule.fetched_at
        here = [each for each in storages if known.get(each) == moment and each not in self._back]
        self._back.update(here)
        return sum(self._sizes[each] for each in here)

    def _freed_by(self, reads: Sequence[int], passing: dict[int, int]) -> int:
        """Note that a unit has read storages; return the bytes that are free because it was the last."""
        freed = 0
        for storage in reads:
            if storage in passing:
                passing[storage] -= 1
                freed += 0 if passing[storage] else self._sizes[storage]
                continue
            self._left[storage] -= 1
            if not self._left[storage]:
                freed += self._freed.get(storage, 0)
        return freed
