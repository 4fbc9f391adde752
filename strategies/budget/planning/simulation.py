"""The bytes and the work of a plan, moment by moment, as its executor runs (see `plan`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import PlannedCall
from strategies.estimate.machine import MACHINES, Machine
from strategies.step.step_graph import StepGraph

RANDOM_STATE_BYTES = {"cpu": 5056}
"""Bytes on the device of the state of its generators, by its type; that of a GPU lies on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What happens to the storages of one block, by their numbers in its program.

    Fields:
        keep: storages that stay on the device.
        offload: storages that wait on the host; inputs of the block may be among them.
        again: storages that are made anew for each request that needs them, and dropped after it.
        is_plain: whether the block runs untouched.
    """

    keep: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    is_plain: bool = False

    @property
    def resident(self) -> frozenset[int]:
        """The storages that are not recomputed."""
        return self.keep | self.offload


PLAIN = Decision(is_plain=True)


@dataclass(kw_only=True, slots=True)
class Effect:
    """What a decision changes in one call of a block.

    Fields:
        gains: bytes more from a moment on, by moment.
        peaks: bytes more than at that moment, reached by what runs between it and the next, by moment.
        flops, seconds: work of what runs again; seconds with `wait_s`.
        wait_s: seconds of waiting for copies to the host and back, by the machine's numbers.
        runs: units that run again, each as often as it does.
        host_bytes: bytes that wait on the host.
    """

    gains: Counter[int] = field(default_factory=Counter)
    peaks: dict[int, int] = field(default_factory=dict)
    flops: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    runs: tuple[int, ...] = ()
    host_bytes: int = 0

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
    schedule = _Schedule.of(call, decision)
    stash_bytes = 0 if decision.is_plain else random_state_bytes
    effect = _Walk(call, schedule, stash_bytes).effect
    effect.runs = tuple(sorted(unit for request in schedule.requests for unit in request))
    effect.flops = sum(call.program.units[unit].flops for unit in effect.runs)
    effect.seconds = sum(call.program.units[unit].seconds for unit in effect.runs)
    effect.host_bytes = sum(map(call.program.nbytes_of, schedule.fetched_at))
    if effect.host_bytes:
        window_s = sum(unit.seconds for unit in call.program.units)
        effect.wait_s = machine.offload_s(effect.host_bytes, window_s)
        effect.seconds += effect.wait_s
    return effect


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
    return graph.held_bytes + np.cumsum(gains)[:-1]


@dataclass(kw_only=True, slots=True)
class _Schedule:
    """When what happens under a decision.

    Fields:
        requests: units that run at each request of backward.
        until: last moment at which the node that asked holds the value of each request.
        runs_at: first moment at which each unit runs again.
        fetched_at: moment at which each offloaded storage comes back.
        read_until: last moment at which a unit reads a storage.
        held_until: last moment at which a node has a storage.
        resident: storages on the device all the time.
        moved: storages that wait on the host.
        until_end: storages that are held until forward ends, whoever reads them.
        again: storages that live for one request.
    """

    requests: list[list[int]]
    until: list[int]
    runs_at: dict[int, int]
    fetched_at: dict[int, int]
    read_until: dict[int, int]
    held_until: dict[int, int]
    resident: frozenset[int]
    moved: frozenset[int]
    until_end: frozenset[int]
    again: frozenset[int]

    @classmethod
    def of(cls, call: PlannedCall, decision: Decision) -> _Schedule:
        """Return what backward asks of a call, in order.

        For each request: which units run for it, what is fetched, and until when it is held.
        """
        program = call.program
        resident = program.saved if decision.is_plain else decision.keep
        known = resident | decision.offload
        schedule = cls(
            requests=[],
            until=list(_held_until(call, decision)),
            runs_at={},
            fetched_at={},
            read_until={},
            held_until={},
            resident=resident,
            moved=decision.offload,
            until_end=decision.resident,
            again=decision.again,
        )
        for storage, moment, until in zip(program.asked, call.asked, schedule.until, strict=True):
            units = program.closure([storage], known, schedule.runs_at.keys(), decision.again)
            schedule.requests.append(units)
            schedule.held_until[storage] = max(until, schedule.held_until.get(storage, -1))
            reads = [each for unit in units for each in program.units[unit].reads]
            for unit in units:
                schedule.runs_at.setdefault(unit, moment)
            for each in reads:
                schedule.read_until[each] = moment
            if decision.offload:
                for each in (*reads, storage):
                    if each in decision.offload:
                        schedule.fetched_at.setdefault(each, moment)
        return schedule

    def last(self) -> dict[int, int]:
        """Return the last moment at which anybody has a storage for backward, by storage.

        Those that live for one request have none.
        """
        found = dict(self.held_until)
        for storage, moment in self.read_until.items():
            found[storage] = max(moment, found.get(storage, -1))
        return {storage: moment for storage, moment in found.items() if storage not in self.again}

    def dropped_by_unit(self) -> frozenset[int]:
        """Return the storages that a unit, and no node of autograd, is the last to have."""
        held = self.held_until
        return frozenset(each for each, moment in self.read_until.items() if moment > held.get(each, -1))


def _held_until(call: PlannedCall, decision: Decision) -> Iterator[int]:
    """Yield the last moment at which each request has its value; what a ticket gives, nobody else holds."""
    for storage, until, released in zip(call.program.asked, call.until, call.released, strict=True):
        has_ticket = not decision.is_plain and (storage >= 0 or storage in decision.offload)
        yield until if has_ticket else max(until, released)


class _Walk:
    """Follows the bytes of one call."""

    def __init__(self, call: PlannedCall, schedule: _Schedule, random_state_bytes: int) -> None:
        self.effect = Effect()
        self._call = call
        self._program = call.program
        self._sizes = call.program.sizes
        self._schedule = schedule
        self._random_state_bytes = random_state_bytes
        self._back: set[int] = set()
        units = call.program.units
        self._readers = Counter(
            storage for request in schedule.requests for unit in request for storage in units[unit].reads
        )
        self._there = schedule.resident | schedule.moved
        self._last = schedule.last()
        self._dropped_by_unit = schedule.dropped_by_unit()
        self._held = frozenset(filter(self._lives_longer, self._last))
        self._hold_from_forward()
        requests = zip(call.asked, self._program.asked, schedule.requests, schedule.until, strict=True)
        for moment, asked, request, until in requests:
            if request or schedule.fetched_at.get(asked) == moment:
                self._run(request, asked, moment)
            if asked in schedule.again:
                self.effect.gains[until + 1] -= self._sizes[asked]
        self._release()

    def _lives_longer(self, storage: int) -> bool:
        """Whether a storage lives longer than without the plan, on the device and in one piece."""
        return self._is_from_forward(storage) and self._last[storage] > self._death(storage)

    def _hold_from_forward(self) -> None:
        """Enter what forward leaves: kept storages, inputs that are read again, states of generators."""
        gains, call, sizes = self.effect.gains, self._call, self._sizes
        for storage in self._held:
            gains[self._death(storage) + 1] += sizes[storage]
        for storage in self._schedule.until_end - self._held:
            if self._death(storage) < call.end:
                gains[self._death(storage) + 1] += sizes[storage]
                gains[call.end + 1] -= sizes[storage]
        for index in self._program.random_units:
            unit = self._program.units[index]
            if not self._there.issuperset(unit.makes):
                stash = unit.random_states * self._random_state_bytes
                gains[call.starts[index] + 1] += stash
                if index not in self._schedule.runs_at:
                    gains[call.end + 1] -= stash

    def _death(self, storage: int) -> int:
        return self._call.deaths[storage] if storage >= 0 else self._call.outer_deaths[-1 - storage]

    def _run(self, request: Sequence[int], asked: int, moment: int) -> None:
        """Follow the bytes while the units of a request run between a moment and the next."""
        live = peak = 0
        units, sizes = self._program.units, self._sizes
        passing = self._passing(request, asked)
        for index in request:
            unit = units[index]
            live += self._fetched(unit.reads, moment)
            for storage in unit.makes:
                live += sizes[storage]
            stash = unit.random_states * self._random_state_bytes
            peak = max(peak, live)
            for storage in unit.early_reads:
                live -= self._read(storage, passing)
            peak = max(peak, live + unit.private_bytes + (self._random_state_bytes if stash else 0))
            live -= stash
            is_first = self._schedule.runs_at[index] == moment
            for storage in unit.makes:
                if not (storage in passing or (is_first and self._is_read_later(storage))):  # superfluous
                    live -= sizes[storage]
            for storage in unit.late_reads:
                live -= self._read(storage, passing)
        live += self._fetched((asked,), moment)
        self.effect.peaks[moment] = max(peak, live)
        self.effect.gains[moment + 1] += live

    def _passing(self, request: Sequence[int], asked: int) -> Counter[int]:
        """Return how often a request reads each storage that lives for it alone; who asked reads it once."""
        again, units = self._schedule.again, self._program.units
        if not again:
            return Counter()
        reads = (storage for unit in request for storage in units[unit].reads)
        return Counter(storage for storage in (asked, *reads) if storage in again)

    def _is_read_later(self, storage: int) -> bool:
        """Whether somebody has what a unit makes for the first time."""
        return storage in self._last and storage not in self._there

    def _fetched(self, storages: Sequence[int], moment: int) -> int:
        """Return the bytes of those storages that come back from the host at this moment, once."""
        known = self._schedule.fetched_at
        if not known:
            return 0
        here = [each for each in storages if known.get(each) == moment and each not in self._back]
        self._back.update(here)
        return sum(self._sizes[each] for each in here)

    def _read(self, storage: int, passing: Counter[int]) -> int:
        """Note that a unit has read a storage; return the bytes that are free because it was the last."""
        if storage in passing:
            passing[storage] -= 1
            return 0 if passing[storage] else self._sizes[storage]
        self._readers[storage] -= 1
        if self._readers[storage] or storage not in self._dropped_by_unit:
            return 0
        is_alive_anyway = self._is_from_forward(storage) and storage not in self._held
        return 0 if is_alive_anyway else self._sizes[storage]

    def _is_from_forward(self, storage: int) -> bool:
        return storage in self._schedule.resident or (storage < 0 and storage not in self._schedule.moved)

    def _release(self) -> None:
        """Take away what a node of autograd is the last to have."""
        gains = self.effect.gains
        for storage, until in self._schedule.held_until.items():
            is_ours = storage in self._held or not self._is_from_forward(storage)
            if is_ours and storage in self._last and storage not in self._dropped_by_unit:
                gains[until + 1] -= self._sizes[storage]
