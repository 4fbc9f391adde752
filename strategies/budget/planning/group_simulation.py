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

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.schedules import Fates, Schedules
from strategies.budget.planning.simulation import Effect, Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A call as part of a group.

    Fields:
        links: storages from outside that the member before makes.
        outs: storages that the next member reads.
        taped_s: seconds that it takes to follow its operators.
    """

    call: PlannedCall
    taped_s: float
    links: frozenset[int] = frozenset()
    outs: frozenset[int] = frozenset()


def first_ask(members: Sequence[Member]) -> int:
    """Return the moment at which backward first asks for what the second forward makes."""
    return min(
        moment
        for each in members
        for storage, moment in zip(each.call.program.asked, each.call.asked, strict=True)
        if storage >= 0 or storage in each.links
    )


def shares_of(
    member: Member, keeps: Sequence[frozenset[int]], moment: int, *, random_state_bytes: int
) -> Simulation:
    """Return what a member adds that holds all that it reads from outside, for each set that it may keep.

    Args:
        keeps: storages that it keeps from its second forward on.
        moment: moment of the second forward.
        random_state_bytes: bytes on the device of the state of a random operator.
    """
    schedules = _scheduled(member, keeps, moment, member.outs)
    return Simulation(schedules, random_state_bytes, taped_s=member.taped_s)


def group_effect(
    members: Sequence[Member], keeps: Sequence[frozenset[int]], *, random_state_bytes: int
) -> tuple[Effect, list[Effect]]:
    """Return what a group changes, and what each of its members adds to that.

    Args:
        members: its calls, in the order of forward.
        keeps: what each keeps from the second forward on.
        random_state_bytes: bytes on the device of the state of a random operator.
    """
    moment = first_ask(members)
    schedules: list[Schedules] = []
    for member, keep in zip(reversed(members), reversed(keeps), strict=True):
        outs = {s for s in member.outs if schedules and _reads(schedules[0], member.call.storages[s])}
        schedules.insert(0, _scheduled(member, [keep], moment, frozenset(outs)))
        schedules[0].follow()
    owned = _owned(schedules)
    shares = [
        Simulation(each, random_state_bytes, owned=own, taped_s=member.taped_s).effect(0)
        for member, each, own in zip(members, schedules, owned, strict=True)
    ]
    effect = Effect()
    live = peak = 0
    for share in shares:
        peak = max(peak, live + share.second_peak_bytes)
        live += share.second_bytes
        effect.gains.update(share.gains)  # adds
        for asked, within in share.peaks.items():
            effect.peaks[asked] = max(within, effect.peaks.get(asked, 0))
        effect.flops += share.flops
        effect.seconds += share.seconds
    effect.peaks[moment] = max(peak, live + effect.peaks.get(moment, 0))
    effect.gains[moment + 1] += live
    return effect, shares


def _scheduled(
    member: Member, keeps: Sequence[frozenset[int]], moment: int, outs: frozenset[int]
) -> Schedules:
    bits_of = member.call.program.runs.bits_of
    fates = [Fates(bits_of(keep), 0, 0) for keep in keeps]
    return Schedules(member.call, fates, links=member.links, outs=outs, second=moment)


def _reads(schedules: Schedules, storage: int) -> bool:
    outer = schedules.call.outer_storages
    return storage in outer and _last(schedules, outer.index(storage)) >= 0


def _last(schedules: Schedules, outer: int) -> int:
    """Return the last moment at which a member has a storage from outside, -1 where it never does."""
    return max((moment for moment, among, _ in schedules.last(-1 - outer) if among), default=-1)


def _owned(schedules: Sequence[Schedules]) -> list[frozenset[int]]:
    """Return for each member the storages from outside that no other one holds longer."""
    latest: dict[int, tuple[int, int]] = {}
    for index, each in enumerate(schedules):
        for number, storage in enumerate(each.call.outer_storages):
            until = _last(each, number)
            if storage not in latest or until > latest[storage][0]:
                latest[storage] = until, index
    return [
        frozenset(-1 - n for n, storage in enumerate(each.call.outer_storages) if latest[storage][1] == index)
        for index, each in enumerate(schedules)
    ]
