"""What a decision changes in a call, by sets and one request after the other: slow, and easy to follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.schedules import Schedules
from strategies.budget.planning.simulation import Decision, Effect

NOTHING = frozenset[int]()


@dataclass(kw_only=True)
class _Asked:
    """What happens for a request: units that run, what they read, make and free, and what is fetched."""

    units: list[int] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    last_read: set[int] = field(default_factory=set)
    fetched: set[int] = field(default_factory=set)


class ByHand:
    """The effect of one decision in one call.

    Args:
        call, decision, state_bytes: the call, the decision, and the bytes of a generator's state.
        links, outs, second: as of `Schedules`, of a member of a group; it keeps `decision.keep`.
        owned: as of `Simulation`.
    """

    def __init__(
        self,
        call: PlannedCall,
        decision: Decision,
        state_bytes: int,
        *,
        links: frozenset[int] = NOTHING,
        outs: frozenset[int] = NOTHING,
        second: int | None = None,
        owned: frozenset[int] | None = None,
    ) -> None:
        self.call, self.program, self.state_bytes = call, call.program, state_bytes
        self.links, self.outs, self.owned = links, outs, owned
        self.moved, self.again, self.drops = set(decision.offload), set(decision.again), decision.drops
        kept = self.program.saved.union(call.dropped) if decision.is_plain else decision.keep
        self.resident = set(kept) if second is None else set[int]()
        self.until_end = set(decision.keep | decision.offload) if second is None else set[int]()
        self.there = set(kept) | self.moved | outs
        self.has_tape, self.is_alone = not decision.is_plain, second is None
        self.copied = self.again | {storage for storage, _ in self.drops}
        self.asked = {index: _Asked() for index in range(len(self.program.asked))}
        self.released: list[tuple[int, int]] = []
        self.read_until: dict[int, int] = {}
        self.held_until = dict(call.tickets_until if self.has_tape else call.graph_until)
        if self.has_tape:
            for storage in (self.moved | links) & call.asked_until.keys():
                self.held_until[storage] = call.asked_until[storage]
        self._run()
        self._fetch()
        self._last_reads()
        self._end_copies()
        if self.has_tape and self.program.asks_in_forward:
            self._hold_in_forward()
        self.second = [] if second is None else self._second_forward(second)
        both = self.held_until.keys() | self.read_until.keys()
        self.last = {s: max(self.held_until.get(s, -1), self.read_until.get(s, -1)) for s in both}

    def effect(self) -> Effect:
        """Return the effect, but for copies to the host."""
        gains, peaks = Counter(dict(self.call.gains)), dict[int, int]()
        held, freed = self._until(gains)
        later = self.last.keys() - self.there
        second_peak, second_bytes = self._second_bytes(freed)
        for index, each in self.asked.items():
            if not (each.units or each.fetched):
                continue
            made = {s for unit in each.units for s in self.program.units[unit].makes}
            superfluous = made - ((later | self.copied) & each.made)
            ending = (freed | self.copied) & each.last_read
            moment = self.call.asked[index]
            later_units = [unit for number, one in self.asked.items() if number > index for unit in one.units]
            peaks[moment], live = self._while(each.units, superfluous, ending, each.fetched, later_units)
            gains[moment + 1] += live
        for until, storage in self.released:
            gains[until + 1] -= self.program.sizes[storage]
        runs = tuple(sorted(unit for each in self.asked.values() for unit in each.units))
        work = [self.program.units[unit] for unit in (*self.second, *runs)]
        return Effect(
            gains=gains,
            peaks=peaks,
            flops=sum(unit.flops for unit in work),
            seconds=sum(unit.seconds for unit in work),
            runs=runs,
            second_runs=tuple(self.second),
            second_peak_bytes=second_peak,
            second_bytes=second_bytes,
            linked_bytes=sum(self.program.sizes[link] for link in self.links),
            holds={self.call.number_of(each): self.last[each] for each in held},
        )

    def _making(self, wanted: Iterable[int], there: set[int]) -> list[int]:
        lacking, units = {s for s in wanted if s >= 0} - there, set[int]()
        while lacking:
            unit = self.program.runs.makers[lacking.pop()]
            units.add(unit)
            made = {s for each in units for s in self.program.units[each].makes}
            lacking = (lacking | {s for s in self.program.units[unit].reads if s >= 0}) - there - made
        return sorted(units)

    def _run(self) -> None:
        there, fleeting, uses = set(self.there), set(self.copied), Counter[int]()
        last = {storage: max(n for s, n in self.drops if s == storage) for storage, _ in self.drops}
        for index, storage in enumerate(self.program.asked):
            if storage < 0:
                continue
            each, used = self.asked[index], {storage}
            if storage not in there:
                each.units = self._making([storage], there)
                each.reads = {s for unit in each.units for s in self.program.units[unit].reads}
                used |= each.reads
                made = {s for unit in each.units for s in self.program.units[unit].makes} - there
                each.made = {s for s in made if s in used or s not in fleeting}
                there |= each.made
            for copy in used & fleeting:
                if copy in self.again:
                    each.dropped.add(copy)
                    continue
                uses[copy] += 1
                if (copy, uses[copy]) in self.drops:
                    each.dropped.add(copy)
                if uses[copy] == last[copy]:  # the next copy stays
                    fleeting.remove(copy)
            there -= each.dropped

    def _fetch(self) -> None:
        waiting = set(self.moved)
        for index, storage in enumerate(self.program.asked):
            if self.call.asked[index] >= self.call.end:
                self.asked[index].fetched = waiting & (self.asked[index].reads | {storage})
                waiting -= self.asked[index].fetched

    def _last_reads(self) -> None:
        unread = {s for each in self.asked.values() for s in each.reads} - self.copied
        for index, each in reversed(self.asked.items()):
            each.last_read = each.reads & unread
            unread -= each.last_read
            self.read_until |= dict.fromkeys(each.last_read, self.call.asked[index])

    def _end_copies(self) -> None:
        copies = dict.fromkeys(self.copied, (-1, -1))  # the last reader, and the last moment of a node
        ended: list[tuple[int, int, int]] = []
        for index, each in self.asked.items():
            asked = self.program.asked[index]
            for storage in each.reads & self.copied:
                copies[storage] = index, copies[storage][1]
            if asked in copies:
                copies[asked] = copies[asked][0], max(self.call.until[index], copies[asked][1])
            for storage in each.dropped:
                ended.append((storage, *copies[storage]))
                copies[storage] = -1, -1
        ended += [(storage, *of) for storage, of in copies.items() if of != (-1, -1)]
        self._enter_ends(ended)

    def _enter_ends(self, ended: Sequence[tuple[int, int, int]]) -> None:
        early = self.copied & self.there
        for storage in self.copied:
            self.held_until.pop(storage, None)
        for storage, reader, until in ended:
            moment = self.call.asked[reader] if reader >= 0 else -1
            is_read_last = moment > until
            stays = storage in early and self.is_alone
            stays &= moment <= max(self.call.all_deaths[storage], self.call.end - 1)
            if is_read_last and not stays:
                self.asked[reader].last_read.add(storage)
            if storage in early:  # counts with what lives from forward on
                early.remove(storage)
                self.held_until[storage] = until
                if is_read_last:
                    self.read_until[storage] = self.call.asked[reader]
            elif not is_read_last:
                self.released.append((until, storage))

    def _hold_in_forward(self) -> None:
        end, asked = self.call.end, self.call.asked
        made = {s for index, each in self.asked.items() if asked[index] < end for s in each.made}
        for storage in made | self.resident & (self.held_until.keys() | self.read_until.keys()):
            self.held_until[storage] = max(end, self.held_until.get(storage, -1))
        for storage in self.moved - {s for each in self.asked.values() for s in each.fetched}:
            self.held_until.pop(storage, None)
            self.read_until.pop(storage, None)

    def _second_forward(self, moment: int) -> list[int]:
        self.there = {s for s in self.there if s in self.outs or s in self.held_until or s in self.read_until}
        units = self._making(self.there, set())
        for storage in {s for unit in units for s in self.program.units[unit].reads}:
            if storage < 0 or storage in self.there:
                self.read_until.setdefault(storage, moment)
        return units

    def _until(self, gains: Counter[int]) -> tuple[set[int], set[int]]:
        """Enter what lives longer than unplanned; return that, and what units free that read it last."""
        call, sizes, deaths = self.call, self.program.sizes, self.call.all_deaths
        held, freed = set[int](), set[int]()
        for storage, last in self.last.items():
            away = storage in self.moved | self.links
            if storage in self.resident or (storage < 0 and not away):
                is_owned = storage >= 0 or self.owned is None or storage in self.owned
                if last <= deaths[storage] or not is_owned:
                    continue
                held.add(storage)
                gains[deaths[storage] + 1] += sizes[storage]
            elif storage in self.outs:
                continue
            if self.held_until.get(storage, -1) < last:
                freed.add(storage)
            else:
                gains[last + 1] -= sizes[storage]
        for storage in self.until_end - held:
            if deaths[storage] < call.end:
                gains[deaths[storage] + 1] += sizes[storage]
                gains[call.end + 1] -= sizes[storage]
        if self.has_tape:
            self._hold_operators(gains, held)
        return held, freed

    def _hold_operators(self, gains: Counter[int], held: set[int]) -> None:
        call, sizes, units = self.call, self.program.sizes, self.program.units
        kept = frozenset((self.resident | self.moved) - {storage for storage, _ in self.drops})
        needed = {*self.second, *(unit for each in self.asked.values() for unit in each.units)}
        until, passing = self._taped_until(kept), dict[int, int]()
        for index, unit in enumerate(units):
            if kept.issuperset(unit.makes):
                continue
            if unit.random_states:
                gains[call.starts[index] + 1] += unit.random_states * self.state_bytes
                gains[until[index] + 1] -= (index not in needed) * unit.random_states * self.state_bytes
            for number, storage in call.passing:
                if number == index and storage not in held:
                    passing[storage] = max(until[index], passing.get(storage, -1))
        for storage, end in passing.items():
            if call.all_deaths[storage] < end:
                gains[call.all_deaths[storage] + 1] += sizes[storage]
                gains[end + 1] -= sizes[storage]

    def _taped_until(self, held: frozenset[int]) -> Sequence[int]:
        """Return until when a tape has each unit that nothing asks for.

        That of a chain lets go, when one of its blocks ends, of what nobody reads any more.

        Args:
            held: storages whose makers no tape has.
        """
        call = self.call
        if not call.ends:
            return [call.end] * len(call.starts)
        until: list[int] = []
        latest = list(call.deaths)  # of what follows from a storage, too
        for unit, start in zip(reversed(self.program.units), reversed(call.starts), strict=True):
            last = max([start, *(latest[each] for each in unit.makes if each not in held)])
            end = next((each for each in call.ends if last < each), call.end)
            for storage in unit.reads if not held.issuperset(unit.makes) else ():
                if storage >= 0:
                    latest[storage] = max(latest[storage], end - 1)
            until.append(end)
        return until[::-1]

    def _second_bytes(self, freed: set[int]) -> tuple[int, int]:
        units = [self.program.units[unit] for unit in self.second]
        makes, reads = {s for each in units for s in each.makes}, {s for each in units for s in each.reads}
        read_later = {s for each in self.asked.values() for s in each.reads}
        stashed = [unit for each in self.asked.values() for unit in each.units]
        ending = (makes - self.there) | (freed - read_later)
        return self._while(self.second, makes - self.there - reads, ending, set(), stashed)

    def _while(
        self,
        running: Sequence[int],
        superfluous: set[int],
        ending: set[int],
        fetched: set[int],
        stashed: Sequence[int],
    ) -> tuple[int, int]:
        """Return the most bytes while units run, and those at their end, counting readers down."""
        units, sizes = self.program.units, self.program.sizes
        steps = sorted(
            ((step, unit, number) for unit in running for number, step in enumerate(units[unit].steps)),
            key=lambda each: each[0].ordinal,
        )
        left = Counter(storage for step, _, _ in steps for storage in step.reads)
        live = peak = 0
        waiting = set(fetched)
        for step, unit, number in steps:
            here = waiting & set(units[unit].reads) if not number else set()
            waiting -= here
            live += sum(sizes[each] for each in here) + step.made_bytes
            handed = sum(sizes[each] for each in step.over if left[each] == 1 and each in ending)
            live -= handed  # whose memory becomes that of what is made
            peak = max(peak, live + step.private_bytes + self.state_bytes * (step.random_states > 0))
            live -= self.state_bytes * step.random_states * (unit not in stashed)
            live -= sum(sizes[each] for each in step.made if each in superfluous)
            for each in step.reads:
                left[each] -= 1
                live -= sizes[each] if not left[each] and each in ending else 0
            live += handed
        live += sum(sizes[each] for each in waiting)
        return max(peak, live), live


def uses(schedules: Schedules, number: int) -> Counter[int]:
    """Return how many requests need each storage under a decision: for themselves, or for what runs."""
    found = Counter[int]()
    for index, storage, _ in schedules.call.program.asked_inside:
        request = schedules.requests.get(index)
        reads = request.reads.items() if request is not None else ()
        found.update({storage, *[each for each, among in reads if among >> number & 1]})
    return found
