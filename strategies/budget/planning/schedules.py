"""When what happens in a call of a block, under many decisions side by side.

A search tries thousands of decisions about one call, and nearly all of them run nearly the same. So sets of
*decisions* are whole numbers here, with a bit for each decision: what is said of a storage or a unit is said
of all decisions at once, and takes as long as of one. Which units run for a request, say, is a walk through
the units that run for it under any decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_program import BlockProgram, PlannedCall

Sets: TypeAlias = dict[int, int]
"""Sets of decisions, as bits, by what they are about: storages, units, or moments."""


class Fates(NamedTuple):
    """A decision that is not plain, as bits of storages by their places in the sizes of the program."""

    keep: int
    moved: int
    again: int
    drops: frozenset[tuple[int, int]] = frozenset()

    def without_idle_drops(self) -> Fates:
        """Return the decision without drops of what is made anew for each request, or waits on the host."""
        away = self.moved | self.again
        idle = {each for each in self.drops if away >> each[0] & 1} if away else ()
        return self._replace(drops=self.drops.difference(idle)) if idle else self


def columns_of(rows: Sequence[int], count: int) -> npt.NDArray[np.uint8]:
    """Return sets as bits, a row each, as an array with a column for each of `count` members."""
    size = (count + 7) // 8
    held = np.frombuffer(b"".join([row.to_bytes(size, "little") for row in rows]), dtype=np.uint8)
    return np.unpackbits(held.reshape(len(rows), size), axis=1, count=count, bitorder="little")


def _transposed(rows: Sequence[int], count: int) -> list[int]:
    """Return for each of `count` members the rows that have it, as bits."""
    if not any(rows):
        return [0] * count
    if len(rows) == 1:
        return [rows[0] >> place & 1 for place in range(count)]
    packed = np.packbits(columns_of(rows, count).T, axis=1, bitorder="little")
    return [int.from_bytes(row, "little") for row in map(bytes, packed)]


@dataclass(kw_only=True, slots=True)
class Request:
    """The events of one request of backward, each with the decisions under which it happens.

    Fields:
        moment: moment of the request.
        storage: what is asked for.
        units: units that run.
        reads: storages that these read.
        made: storages that they make, and that were not there.
        dropped: storages that are dropped after the request.
        last_read: storages that nobody reads after the request; of what is dropped, this copy.
        fetched: storages that come back from the host.
    """

    moment: int
    storage: int
    units: Sets = field(default_factory=dict)
    reads: Sets = field(default_factory=dict)
    made: Sets = field(default_factory=dict)
    dropped: Sets = field(default_factory=dict)
    last_read: Sets = field(default_factory=dict)
    fetched: Sets = field(default_factory=dict)


class Schedules:
    """When what happens in a call under some decisions.

    Args:
        call: the call.
        fates: the decisions.
        is_plain: whether the block runs untouched; then decisions keep what autograd has.
        links: storages from outside that the member before makes, in a group.
        outs: storages that the next member reads.
        second: moment of the second forward; `None` outside of groups.

    Attributes:
        everyone: all decisions.
        resident: storages on the device from forward on.
        moved: storages that wait on the host.
        there: storages that requests find made: from forward or the second forward on, or on the host.
        copied: storages that are dropped and made again.
        dropping: those that are dropped after so many requests, not after each.
        requests: the requests for which anything happens, by number.
        second_units, second_reads: what runs in the second forward, and what that reads.
        held: last moments at which a node has each storage; of what is dropped, the copy of forward.
        read: last moments at which a unit reads it.
        released: last moments at which a node has another copy of what is dropped, storages and decisions.
    """

    def __init__(
        self,
        call: PlannedCall,
        fates: Sequence[Fates],
        *,
        is_plain: bool = False,
        links: frozenset[int] = frozenset(),
        outs: frozenset[int] = frozenset(),
        second: int | None = None,
    ) -> None:
        self.call, self.fates, self.links, self.outs, self.second = call, fates, links, outs, second
        self.has_tape, self.count, self.everyone = not is_plain, len(fates), (1 << len(fates)) - 1
        self._program: BlockProgram = call.program
        size = len(call.program.sizes)
        kept, self.moved, self._again = (
            _transposed(sets, size)
            for sets in ([x.keep for x in fates], [x.moved for x in fates], [x.again for x in fates])
        )
        for storage in outs:
            kept[storage] = self.everyone
        self.resident = kept if second is None else [0] * size
        self.there = [a | b for a, b in zip(kept, self.moved, strict=True)]
        self._drops: dict[int, Sets] = {}
        for number, each in enumerate(fates):
            for storage, after in each.drops:
                of = self._drops.setdefault(storage, {})
                of[after] = of.get(after, 0) | 1 << number
        self._counts = {storage: [self.everyone] for storage in self._drops}  # decisions by number of uses
        self.dropping = {storage: _union(of.values()) for storage, of in self._drops.items()}
        again = {storage: among for storage, among in enumerate(self._again) if among}
        self.copied: Sets = {s: again.get(s, 0) | self.dropping.get(s, 0) for s in again | self._drops}
        self.requests: dict[int, Request] = {}
        self.second_units: Sets = {}
        self.second_reads: Sets = {}
        self.released: list[tuple[int, int, int]] = []
        self.read: dict[int, Sets] = {}
        self._run()

    def useless_drops(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield drops that no request follows, each with the number of its decision."""
        for storage, of in self._drops.items():
            counts = self._counts[storage]
            for after, among in of.items():
                useless = among & _union(counts[: after + 1])
                while useless:
                    number = useless.bit_length() - 1
                    useless ^= 1 << number
                    yield number, (storage, after)

    def follow(self) -> None:
        """Find until when each storage is held, and what comes back from the host when."""
        self.held = self._tickets()
        if any(self.moved):
            self._fetch()
        self._find_last_reads()
        if self.copied:
            self._end_copies()
        if self.has_tape and self._program.asks_in_forward:
            self._hold_in_forward()
        if self.second is not None:
            self._run_second(self.second)

    def last(self, storage: int) -> Sequence[tuple[int, int, bool]]:
        """Return last moments at which anybody has a storage, decisions, and whether a node is the last."""
        held, read = self.held.get(storage), self.read.get(storage)
        if not read:
            return [(moment, among, True) for moment, among in (held or {}).items()]
        if not held:
            return [(moment, among, False) for moment, among in read.items()]
        any_held, any_read = _union(held.values()), _union(read.values())
        pairs = [(until, among & ~any_read, -1) for until, among in held.items()]
        pairs += [(-1, among & ~any_held, moment) for moment, among in read.items()]
        pairs += [(until, a & b, moment) for until, a in held.items() for moment, b in read.items()]
        return [(max(until, moment), among, until >= moment) for until, among, moment in pairs if among]

    def _run(self) -> None:
        """Enter what runs for each request, and what is dropped after it."""
        there, fleeting, again = list(self.there), dict(self.copied), self._again
        for index, storage, _ in self._program.asked_inside:
            lacking = self.everyone & ~there[storage]
            if not lacking and storage not in fleeting:
                continue
            request = Request(moment=self.call.asked[index], storage=storage)
            if lacking:  # of most storages nothing runs again
                self._make(request, lacking, there, fleeting)
            for each in fleeting.keys() & {storage, *request.reads} if fleeting else ():
                used = self.everyone if each == storage else request.reads[each]
                dropped = used & again[each]
                if counted := used & self.dropping.get(each, 0) & ~again[each]:
                    dropped |= self._counted(each, counted, fleeting)
                if dropped:
                    request.dropped[each] = dropped
                    there[each] &= ~dropped
            self.requests[index] = request

    def _make(self, request: Request, lacking: int, there: list[int], fleeting: Sets) -> None:
        """Enter which units run for a request, and what they make that stays."""
        units = self._program.units
        request.units = ran = self._running({request.storage: lacking}, there)
        request.reads = reads = _reads(self._program, ran)
        for unit, among in ran.items():
            for each in units[unit].makes:
                made = among & ~there[each]
                if each in fleeting and each != request.storage:
                    made &= reads.get(each, 0) | ~fleeting[each]
                if made:
                    request.made[each] = made
                    there[each] |= made

    def _running(self, wanted: Sets, there: Sequence[int]) -> Sets:
        """Return the units, in order, that make what is wanted from what is there."""
        makers, units, ran = self._program.runs.makers, self._program.units, Sets()
        pending = sum(1 << storage for storage in wanted)
        while pending:
            storage = pending.bit_length() - 1
            pending ^= 1 << storage
            unit = makers[storage]
            known = ran.get(unit, 0)
            fresh = wanted[storage] & ~known
            if not fresh:
                continue
            ran[unit] = known | fresh
            for read in units[unit].reads:
                if read >= 0 and (lacking := fresh & ~there[read]):
                    wanted[read] = wanted.get(read, 0) | lacking
                    pending |= 1 << read
        return dict(sorted(ran.items()))

    def _counted(self, storage: int, used: int, fleeting: Sets) -> int:
        """Count uses of a storage under some decisions; return under which it is dropped after this one."""
        of, uses, dropped = self._drops[storage], self._counts[storage], 0
        uses.append(0)
        for count in range(len(uses) - 1, 0, -1):
            moving = used & uses[count - 1]
            if moving:
                uses[count - 1] ^= moving
                uses[count] |= moving
                dropped |= moving & of.get(count, 0)
                later = _union(among for after, among in of.items() if after > count)
                fleeting[storage] &= ~(moving & ~later)  # the next copy stays
        return dropped

    def _tickets(self) -> dict[int, Sets]:
        """Return until when nodes hold each storage; what a ticket gives, nobody but who asked holds."""
        call, moved = self.call, self.moved
        until = call.tickets_until if self.has_tape else call.graph_until
        found = {}
        for storage, moment in until.items():
            among = self.everyone & ~self.copied.get(storage, 0)
            asked = call.asked_until.get(storage, moment)
            if asked == moment or not self.has_tape:
                found[storage] = {moment: among}
            elif storage in self.links:
                found[storage] = {asked: among}
            else:
                found[storage] = {moment: among & ~moved[storage], asked: among & moved[storage]}
        return found

    def _fetch(self) -> None:
        """Note the first request after forward that needs each storage on the host."""
        waiting = {storage: among for storage, among in enumerate(self.moved) if among}
        size = len(self.moved)
        for index, (storage, moment) in enumerate(zip(self._program.asked, self.call.asked, strict=True)):
            if moment < self.call.end:
                continue
            known = self.requests.get(index)
            needs = {**(known.reads if known is not None else {}), storage: self.everyone}
            for each, among in needs.items():
                fetched = waiting.get(each % size, 0) & among
                if fetched:
                    known = self.requests.setdefault(index, known or Request(moment=moment, storage=storage))
                    known.fetched[each] = fetched
                    waiting[each % size] &= ~fetched

    def _find_last_reads(self) -> None:
        unread = dict[int, int]()
        for index in sorted(self.requests, reverse=True):
            request = self.requests[index]
            for storage, among in request.reads.items():
                left = unread.get(storage)
                if left is None:
                    left = self.everyone & ~self.copied.get(storage, 0)
                last = left & among
                if last:
                    request.last_read[storage] = last
                    self.read.setdefault(storage, {})[request.moment] = last
                unread[storage] = left & ~last

    def _end_copies(self) -> None:
        """Find until when each copy of what is dropped is held: by the units of a request, or by a node."""
        copied, until, again = self.copied, self.call.until, self._again
        early = {each: among & self.there[each] for each, among in copied.items()}  # copies of forward
        # by storage, of each copy the last request that reads it, and the last moment of a node that has it
        readers = {each: {-1: among} for each, among in self.dropping.items()}
        holders = {each: {-1: among} for each, among in self.dropping.items()}
        for index, request in self.requests.items():
            for storage in readers.keys() & request.reads.keys():
                readers[storage] = _changed(readers[storage], index, request.reads[storage])
            if request.storage in holders:
                holders[request.storage] = _raised(holders[request.storage], until[index])
            for storage, dropped in request.dropped.items():
                if once := dropped & again[storage]:  # each request has a copy of its own
                    read = once & request.reads.get(storage, 0)
                    held = until[index] if storage == request.storage else -1
                    self._end(storage, index, held, read, early)
                    self._end(storage, -1, held, once ^ read, early)
                if after := dropped ^ once:
                    self._end_all(storage, readers, holders, after, early)
        for storage, among in self.dropping.items():
            unused = readers[storage].get(-1, 0) & holders[storage].get(-1, 0)
            self._end_all(storage, readers, holders, among & ~unused, early)

    def _end_all(
        self, storage: int, readers: dict[int, Sets], holders: dict[int, Sets], ended: int, early: Sets
    ) -> None:
        """Enter the end of a copy under some decisions, whoever had it last; the next copy is unused."""
        for index, a in readers[storage].items():
            for until, b in holders[storage].items():
                self._end(storage, index, until, a & b & ended, early)
        readers[storage] = _changed(readers[storage], -1, ended)
        holders[storage] = _changed(holders[storage], -1, ended)

    def _end(self, storage: int, index: int, until: int, among: int, early: Sets) -> None:
        """Enter the end of a copy: that of forward, if it has not ended before.

        Args:
            storage: the storage.
            index: the last request that reads it, or -1.
            until: the last moment of a node that has it, or -1.
            among: the decisions.
            early: the decisions under which each copy of forward has not ended; they are taken from it.
        """
        if not among:
            return
        moment, first = self.call.asked[index] if index >= 0 else -1, among & early[storage]
        if moment > until:
            last_read = self.requests[index].last_read
            # forward, or the module, may have its copy longer
            stays = self.second is None and moment <= max(self.call.all_deaths[storage], self.call.end - 1)
            last_read[storage] = last_read.get(storage, 0) | (among ^ first if stays else among)
        if first:  # counts with what lives from forward on
            early[storage] ^= first
            join(self.held.setdefault(storage, {}), {until: first})
            if moment > until:
                join(self.read.setdefault(storage, {}), {moment: first})
        if moment <= until and among != first:
            self.released.append((until, storage, among ^ first))

    def _hold_in_forward(self) -> None:
        """Hold what stays, or is made again before forward ends, until then: its tape does."""
        end, early, fetched = self.call.end, Sets(), Sets()
        for request in self.requests.values():
            if request.moment < end:
                join(early, request.made)
            join(fetched, request.fetched)
        for storage in range(len(self._program.nbytes)):
            held, read = self.held.get(storage, {}), self.read.get(storage, {})
            known = _union((*held.values(), *read.values()))
            among = early.get(storage, 0) | self.resident[storage] & known
            longer = Sets() if not among else {end: among & ~_union(held.values())}
            for until, each in held.items():
                join(longer, {until: each & ~among})
                join(longer, {max(until, end): each & among})
            self.held[storage] = longer
        size = len(self.moved)
        for place, moved in enumerate(self.moved):
            storage = place if place < len(self._program.nbytes) else place - size
            away = moved & ~fetched.get(storage, 0)  # nobody needs it after forward
            for of in (self.held, self.read):
                if away and storage in of:
                    of[storage] = {moment: each & ~away for moment, each in of[storage].items()}

    def _run_second(self, moment: int) -> None:
        """Enter the second forward: it makes what requests find made, of that what anybody has."""
        for storage in range(len(self._program.nbytes)):
            if storage not in self.outs:
                self.there[storage] &= _union(among for _, among, _ in self.last(storage))
        wanted = {storage: among for storage, among in enumerate(self.there) if among}
        self.second_units = self._running(wanted, [0] * len(self.there))
        self.second_reads = _reads(self._program, self.second_units)
        for storage, among in self.second_reads.items():
            read = self.read.setdefault(storage, {})
            fresh = among & (self.there[storage] if storage >= 0 else among) & ~_union(read.values())
            if fresh:
                read[moment] = read.get(moment, 0) | fresh


def _reads(program: BlockProgram, units: Mapping[int, int]) -> Sets:
    """Return what units read, with the decisions under which they do."""
    found = Sets()
    for unit, among in units.items():
        for storage in program.units[unit].reads:
            found[storage] = found.get(storage, 0) | among
    return found


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def join(sets: Sets, others: Mapping[int, int]) -> None:
    """Add sets of decisions to others of the same key."""
    for key, among in others.items():
        if among:
            sets[key] = sets.get(key, 0) | among


def _changed(parts: Sets, key: int, among: int) -> Sets:
    """Return a partition in which some decisions have another key."""
    found = {known: left for known, each in parts.items() if (left := each & ~among)}
    found[key] = found.get(key, 0) | among
    return found


def _raised(parts: Sets, least: int) -> Sets:
    """Return a partition in which no key is smaller."""
    found = Sets()
    for key, among in parts.items():
        found[max(key, least)] = found.get(max(key, least), 0) | among
    return found
