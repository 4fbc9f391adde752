"""The bytes and the work of a group: consecutive blocks that hold the input of the first alone.

When backward reaches a group, its forward runs again once: the *second forward* makes the inputs of its
blocks and what each block keeps from then on. Then backward goes on as for any planned block, and what is not
kept runs once more. The rules of `plan` hold, with these in addition:

1. In forward no block of a group keeps anything. A storage that one block makes and the next one reads is a
   *link*; it is from outside of the next block, and yet it is made again.
2. The first ticket of the group that is redeemed starts the second forward, block by block in the order of
   forward. In each block the units run that its needed link and its needed kept storages follow from.
3. What a unit makes in the second forward is held until its last reader in it has run; links and kept
   storages until nobody reads them any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.simulation import Effect


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A call as part of a group.

    Fields:
        call: the call.
        links: storages from outside that the member before makes.
        outs: storages that the next member reads.
    """

    call: PlannedCall
    links: frozenset[int] = frozenset()
    outs: frozenset[int] = frozenset()


@dataclass(kw_only=True, slots=True)
class Share:
    """What one member adds to its group.

    Fields:
        effect: what changes, moment by moment, without its second forward.
        second_peak_bytes: most bytes that its second forward adds while it runs.
        second_bytes: bytes that there are more after it.
        linked_bytes: bytes of links that the member before makes.
        again: units of the second forward.
        runs: units that run for requests of backward.
    """

    effect: Effect = field(default_factory=Effect)
    second_peak_bytes: int = 0
    second_bytes: int = 0
    linked_bytes: int = 0
    again: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()


def first_ask(members: Sequence[Member]) -> int:
    """Return the moment at which backward first asks for what the second forward makes."""
    return min(
        moment
        for each in members
        for storage, moment in zip(each.call.program.asked, each.call.asked, strict=True)
        if storage >= 0 or storage in each.links
    )


def share_of(
    member: Member,
    keep: frozenset[int],
    moment: int,
    *,
    random_state_bytes: int,
    owned: frozenset[int] | None = None,
) -> Share:
    """Return what a member adds.

    Args:
        member: the member.
        keep: storages that it keeps from its second forward on.
        moment: moment of the second forward.
        random_state_bytes: bytes on the device of the state of a random operator.
        owned: storages from outside that no other member holds longer; `None`: all.
    """
    return _Walk(Uses.of(member, keep, moment), random_state_bytes, owned).share


def group_effect(
    members: Sequence[Member], keeps: Sequence[frozenset[int]], *, random_state_bytes: int
) -> tuple[Effect, list[Share]]:
    """Return what a group changes, and the shares of its members.

    Args:
        members: its calls, in the order of forward.
        keeps: what each keeps from the second forward on.
        random_state_bytes: bytes on the device of the state of a random operator.
    """
    moment = first_ask(members)
    uses: list[Uses] = []
    for member, keep in zip(reversed(members), reversed(keeps), strict=True):
        outs = {s for s in member.outs if uses[0].uses_link(member.call.storages[s])} if uses else set()
        uses.insert(0, Uses.of(replace(member, outs=frozenset(outs)), keep, moment))
    shares = [
        _Walk(each, random_state_bytes, owned).share for each, owned in zip(uses, _owned(uses), strict=True)
    ]
    effect = Effect()
    live = peak = 0
    for share in shares:
        peak = max(peak, live + share.second_peak_bytes)
        live += share.second_bytes
        effect.gains.update(share.effect.gains)  # adds
        for asked, within in share.effect.peaks.items():
            effect.peaks[asked] = max(within, effect.peaks.get(asked, 0))
        effect.flops += share.effect.flops
        effect.seconds += share.effect.seconds
    effect.peaks[moment] = max(peak, live + effect.peaks.get(moment, 0))
    effect.gains[moment + 1] += live
    return effect, shares


@dataclass(kw_only=True, slots=True)
class Uses:
    """Who uses what of a member, and when.

    Fields:
        member: the member.
        moment: moment of the second forward.
        second: units of the second forward, in order.
        stays: storages that are there after it.
        requests: units that run at each request of backward.
        reads: how often units read each storage that is at hand when they run, in both.
        reads_second: how often units of the second forward read each storage.
        read_until: last moment at which a unit reads a storage.
        held_until: last moment at which a node has a storage.
    """

    member: Member
    moment: int
    second: list[int]
    stays: frozenset[int]
    requests: list[list[int]]
    reads: Counter[int]
    reads_second: Counter[int]
    read_until: dict[int, int]
    held_until: dict[int, int]

    @classmethod
    def of(cls, member: Member, keep: frozenset[int], moment: int) -> Uses:
        """Return what backward asks of a member that keeps `keep` from `moment` on."""
        call, program = member.call, member.call.program
        there = keep | member.outs
        ran: set[int] = set()
        requests: list[list[int]] = []
        held_until: dict[int, int] = {}
        read_until: dict[int, int] = {}
        for storage, asked, until, released in zip(
            program.asked, call.asked, call.until, call.released, strict=True
        ):
            is_there = storage < 0 or storage in there or program.makers[storage] in ran
            units = [] if is_there else program.closure([storage], there, ran)
            requests.append(units)
            ran.update(units)
            has_ticket = storage >= 0 or storage in member.links
            last = until if has_ticket else max(until, released)
            held_until[storage] = max(last, held_until.get(storage, -1))
            read_until |= dict.fromkeys((s for unit in units for s in program.units[unit].reads), asked)
        wanted = frozenset(keep.intersection({*held_until, *read_until})) | member.outs
        second = program.closure(wanted, frozenset(), frozenset())
        in_second = Counter(s for unit in second for s in program.units[unit].reads)
        later = Counter(s for units in requests for unit in units for s in program.units[unit].reads)
        at_hand = Counter({s: count for s, count in in_second.items() if s < 0 or s in wanted})
        return cls(
            member=member,
            moment=moment,
            second=second,
            stays=wanted,
            requests=requests,
            reads=at_hand + later,
            reads_second=in_second,
            read_until=dict.fromkeys(at_hand, moment) | read_until,
            held_until=held_until,
        )

    def uses_link(self, storage: int) -> bool:
        """Say whether anybody reads a storage of the step that the member before makes."""
        outer = self.member.call.outer_storages
        return storage in outer and self.last(-1 - outer.index(storage)) >= 0

    def last(self, storage: int) -> int:
        """Return the last moment at which anybody has a storage; -1: nobody does."""
        return max(self.held_until.get(storage, -1), self.read_until.get(storage, -1))


def _owned(uses: Sequence[Uses]) -> list[frozenset[int]]:
    """Return for each member the storages from outside that no other one holds longer."""
    latest: dict[int, tuple[int, int]] = {}
    for index, each in enumerate(uses):
        for number, storage in enumerate(each.member.call.outer_storages):
            last = each.last(-1 - number)
            if storage not in latest or last > latest[storage][0]:
                latest[storage] = last, index
    return [
        frozenset(
            -1 - number
            for number, storage in enumerate(each.member.call.outer_storages)
            if latest[storage][1] == index
        )
        for index, each in enumerate(uses)
    ]


class _Walk:
    """Follows the bytes of one member."""

    def __init__(self, uses: Uses, random_state_bytes: int, owned: frozenset[int] | None) -> None:
        self.share = Share()
        self._uses = uses
        self._call, self._links, self._outs = uses.member.call, uses.member.links, uses.member.outs
        self._program, self._sizes = self._call.program, self._call.program.sizes
        self._owned = owned
        self._random_state_bytes = random_state_bytes
        self._left = Counter(uses.reads)
        later = {unit for units in uses.requests for unit in units}
        self._held = frozenset(filter(self._is_held_from_forward, {*uses.reads, *uses.held_until}))
        self._hold_from_forward(later)
        self._run_second(later)
        for moment, units in zip(self._call.asked, uses.requests, strict=True):
            if units:
                self._run(units, moment)
        self._release()
        again, runs = tuple(uses.second), tuple(sorted(later))
        self.share.again, self.share.runs = again, runs
        self.share.linked_bytes = sum(self._sizes[link] for link in self._links)
        work = [self._program.units[unit] for unit in (*again, *runs)]
        self.share.effect.flops = sum(unit.flops for unit in work)
        self.share.effect.seconds = sum(unit.seconds for unit in work)

    def _is_held_from_forward(self, storage: int) -> bool:
        """Say whether a storage from outside of the group lives longer than without it, for this member."""
        if storage >= 0 or storage in self._links or not (self._owned is None or storage in self._owned):
            return False
        return self._uses.last(storage) > self._call.outer_deaths[-1 - storage]

    def _hold_from_forward(self, later: set[int]) -> None:
        """Enter what forward leaves: inputs that are read again, states of generators."""
        gains, call = self.share.effect.gains, self._call
        for storage in self._held:
            gains[call.outer_deaths[-1 - storage] + 1] += self._sizes[storage]
        needed = later.union(self._uses.second)
        for index in self._program.random_units:
            stash = self._stash_of(index)
            gains[call.starts[index] + 1] += stash
            if index not in needed:
                gains[call.end + 1] -= stash

    def _stash_of(self, unit: int) -> int:
        return self._program.units[unit].random_states * self._random_state_bytes

    def _run_second(self, later: set[int]) -> None:
        """Follow the bytes of the second forward."""
        uses, units, sizes = self._uses, self._program.units, self._sizes
        waiting = Counter(uses.reads_second)
        live = peak = 0
        for index in uses.second:
            unit = units[index]
            live += sum(sizes[storage] for storage in unit.makes)
            stash = self._stash_of(index)
            peak = max(peak, live)
            live -= sum(self._read_second(storage, waiting) for storage in unit.early_reads)
            peak = max(peak, live + unit.private_bytes + (self._random_state_bytes if stash else 0))
            if index not in later:
                live -= stash
            live -= sum(sizes[s] for s in unit.makes if s not in uses.stays and not waiting[s])
            live -= sum(self._read_second(storage, waiting) for storage in unit.late_reads)
        self.share.second_peak_bytes, self.share.second_bytes = peak, live

    def _read_second(self, storage: int, waiting: Counter[int]) -> int:
        """Note that a unit of the second forward has read a storage; return the bytes that are free then."""
        waiting[storage] -= 1
        if storage < 0 or storage in self._uses.stays:
            return self._read(storage)
        return 0 if waiting[storage] else self._sizes[storage]

    def _run(self, request: Sequence[int], moment: int) -> None:
        """Follow the bytes while the units of a request run between a moment and the next."""
        uses, units, sizes = self._uses, self._program.units, self._sizes
        live = peak = 0
        for index in request:
            unit = units[index]
            live += sum(sizes[storage] for storage in unit.makes)
            stash = self._stash_of(index)
            peak = max(peak, live)
            for storage in unit.early_reads:
                live -= self._read(storage)
            peak = max(peak, live + unit.private_bytes + (self._random_state_bytes if stash else 0))
            live -= stash
            for storage in unit.makes:
                if storage in uses.stays or uses.last(storage) < 0:  # superfluous
                    live -= sizes[storage]
            for storage in unit.late_reads:
                live -= self._read(storage)
        self.share.effect.peaks[moment] = max(peak, live)
        self.share.effect.gains[moment + 1] += live

    def _read(self, storage: int) -> int:
        """Note that a unit has read a storage; return the bytes that are free because it was the last."""
        self._left[storage] -= 1
        is_last = not self._left[storage] and self._is_dropped_by_unit(storage)
        return self._sizes[storage] if is_last and self._is_ours(storage) else 0

    def _is_dropped_by_unit(self, storage: int) -> bool:
        return self._uses.read_until.get(storage, -1) > self._uses.held_until.get(storage, -1)

    def _is_ours(self, storage: int) -> bool:
        """Say whether this member is the last to have a storage: links to the next one are not its own."""
        return storage in self._held or storage in self._links or (storage >= 0 and storage not in self._outs)

    def _release(self) -> None:
        """Take away what a node of autograd is the last to have."""
        gains = self.share.effect.gains
        for storage, until in self._uses.held_until.items():
            if self._is_ours(storage) and not self._is_dropped_by_unit(storage):
                gains[until + 1] -= self._sizes[storage]
