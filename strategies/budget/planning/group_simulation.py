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
from strategies.budget.planning.simulation import Effect, Schedule, effect_of_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A call as part of a group.

    Fields:
        links: storages from outside that the member before makes.
        outs: storages that the next member reads.
    """

    call: PlannedCall
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


def share_of(member: Member, keep: frozenset[int], moment: int, *, random_state_bytes: int) -> Effect:
    """Return what a member adds that holds all that it reads from outside.

    Args:
        keep: storages that it keeps from its second forward on.
        moment: moment of the second forward.
        random_state_bytes: bytes on the device of the state of a random operator.
    """
    return effect_of_schedule(_scheduled(member, keep, moment, member.outs), random_state_bytes)


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
    schedules: list[Schedule] = []
    for member, keep in zip(reversed(members), reversed(keeps), strict=True):
        outs = {s for s in member.outs if schedules and _reads(schedules[0], member.call.storages[s])}
        schedules.insert(0, _scheduled(member, keep, moment, frozenset(outs)))
    owned = _owned(schedules)
    shares = [
        effect_of_schedule(each, random_state_bytes, own) for each, own in zip(schedules, owned, strict=True)
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


def _scheduled(member: Member, keep: frozenset[int], moment: int, outs: frozenset[int]) -> Schedule:
    return Schedule.in_group(member.call, keep, moment, links=member.links, outs=outs)


def _reads(schedule: Schedule, storage: int) -> bool:
    outer = schedule.call.outer_storages
    return storage in outer and -1 - outer.index(storage) in schedule.last


def _owned(schedules: Sequence[Schedule]) -> list[frozenset[int]]:
    """Return for each member the storages from outside that no other one holds longer."""
    latest: dict[int, tuple[int, int]] = {}
    for index, each in enumerate(schedules):
        for number, storage in enumerate(each.call.outer_storages):
            until = each.last.get(-1 - number, -1)
            if storage not in latest or until > latest[storage][0]:
                latest[storage] = until, index
    return [
        frozenset(-1 - n for n, storage in enumerate(each.call.outer_storages) if latest[storage][1] == index)
        for index, each in enumerate(schedules)
    ]
