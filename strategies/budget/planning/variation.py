"""Decisions that come of others: joined of two, or with some changes.

Backward begins at the end of a block, where all of it waits, and has room when it comes to the beginning. So
good decisions keep little of the beginning, make little anew there, and do otherwise at the end. Single
changes do not get there: each one alone is worse.

Source: crossover and mutation of genetic algorithms, Holland (1975).
"""

from __future__ import annotations

import random
from collections import Counter

from strategies.budget.planning.block_program import BlockProgram
from strategies.budget.planning.schedules import Fates

_NARROW = 16
"""Places that half of all decisions are joined at: those at which the fewest bytes are handed on."""

_TWICE = 0.25
"""Share of decisions with two changes."""


class Variation:
    """Makes decisions about one program of others.

    Args:
        program: the program.
        movable: storages that may wait on the host.
        may_drop: whether storages may be dropped between requests that need them.
    """

    def __init__(self, program: BlockProgram, movable: frozenset[int], *, may_drop: bool) -> None:
        self._program, self._handed, self._movable = program, _handed_on(program), sorted(movable)
        runs, count = program.runs, len(program.nbytes)
        nbytes = [sum(map(program.nbytes.__getitem__, runs.storages_in(each))) for each in self._handed]
        self._places = range(1, count)
        self._narrow = sorted(self._places, key=nbytes.__getitem__)[:_NARROW]
        self._kinds = [kind for kind in program.kinds if program.older.isdisjoint(kind)]
        self._weights = [max(program.nbytes[each[0]], 1) for each in self._kinds]
        self._anew, self._free = runs.bits_of(program.fleeting_chains), ~runs.bits_of(program.pinned)
        self._droppable = program.droppable if may_drop else frozenset[int]()
        self._uses = Counter((*program.asked, *(each for unit in program.units for each in unit.reads)))
        self._ways = ["keep", "anew", "once"]
        self._ways += ["drop"] * 2 if self._droppable else []
        self._ways += ["move"] if movable else []

    def joined(self, first: Fates, last: Fates, chance: random.Random) -> Fates:
        """Return what `first` says up to a place in forward, and `last` from there on.

        Half of them keep what is handed on there.
        """
        if not self._places:
            return last
        place = chance.choice(chance.choice((self._narrow, self._places)))
        before = (1 << place) - 1
        keep, moved, again = (a & before | b & ~before for a, b in zip(first[:3], last[:3], strict=True))
        if chance.randrange(2):
            keep |= self._handed[place] & ~moved
        drops = {each for each in first.drops if each[0] < place}
        drops |= {each for each in last.drops if each[0] >= place}
        return self._completed(Fates(keep, moved, again, frozenset(drops)))

    def changed(self, fates: Fates, chance: random.Random) -> Fates:
        """Return a decision with one change, or with two, to storages of one kind in a row."""
        for _ in range(1 + (chance.random() < _TWICE)):
            fates = self._with_change(fates, chance)
        return self._completed(fates)

    def _with_change(self, fates: Fates, chance: random.Random) -> Fates:
        keep, moved, again, drops = fates
        if not self._kinds:
            return fates
        (kind,) = chance.choices(self._kinds, self._weights)
        first = chance.randrange(len(kind))
        storages = kind[first : chance.choice((first, chance.randrange(first, len(kind)))) + 1]
        bits_of = self._program.runs.bits_of
        part = bits_of(storages) & ~moved
        match chance.choice(self._ways):
            case "keep":
                keep |= part
            case "anew":  # half of the time with what only they are made of
                part &= self._anew
                more = self._program.unsaved_operands(part) & self._anew if chance.randrange(2) else 0
                keep, again = keep & ~part, again | part | more
            case "once":
                keep, again = keep & ~(part & self._free), again & ~part
            case "drop":  # after one of their uses, or no longer after it
                some = self._droppable.intersection(storages)
                drops ^= {(each, 1 + chance.randrange(self._uses[each] or 1)) for each in some}
            case _:
                each = bits_of([chance.choice(self._movable)])
                keep, moved = keep & ~each, moved ^ each
        return Fates(keep, moved, again, drops)

    def _completed(self, fates: Fates) -> Fates:
        """Return a decision of which each storage has one fate, and keeps what cannot be made again."""
        keep = self._program.completed_bits(fates.keep & ~fates.moved, fates.moved)
        again = fates.again & ~(keep | fates.moved)
        return Fates(keep, fates.moved, again, fates.drops).without_idle_drops()


def _handed_on(program: BlockProgram) -> list[int]:
    """Return for each place the storages made before it that units read which make others, as bits."""
    last = [0] * len(program.nbytes)
    for unit in program.units:
        for storage in unit.reads:
            if storage >= 0 and storage not in program.older:
                last[storage] = max(last[storage], *unit.makes, 0)
    found, here = [0], 0
    for place in range(1, len(last)):
        here |= 1 << place - 1
        here &= ~sum(1 << each for each in program.runs.storages_in(here) if last[each] < place)
        found.append(here)
    return found
