"""Units of blocks: operators that run again together, and which of them must run.

Sets of storages are whole numbers here, with a bit for each by its place in the sizes of the program: what
runs is found by operations on these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple


class UnitStep(NamedTuple):
    """One operator of a unit.

    Fields:
        ordinal: its ordinal.
        made_bytes, private_bytes: bytes that it makes, and that it makes and frees on top.
        random_states: states of generators that are stashed for it.
        reads, made: storages that the unit reads, and makes, for which this is its last operator.
        over: storages that it writes over: in their memory, if nobody reads them any more, else in a copy.
    """

    ordinal: int
    made_bytes: int
    private_bytes: int
    random_states: int
    reads: tuple[int, ...]
    made: tuple[int, ...]
    over: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Operators that run again together: one that makes storages or writes over some, and those that go on.

    Fields:
        name: name of the first operator.
        operators: their ordinals.
        steps: what each of them does.
        reads: storages that they read and did not make.
        makes: storages that they make.
        flops, seconds: their work.
        random_states: states of generators that are stashed for them.
        is_repeatable: whether they may run again.
    """

    name: str
    operators: tuple[int, ...]
    steps: tuple[UnitStep, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: int
    seconds: float
    random_states: int
    is_repeatable: bool


class Run:
    """Units that run one after the other, for a request of backward or in the second forward of a group.

    Attributes:
        units: their numbers, in order.
        reads, makes: the storages that they read and make, as bits.
    """

    def __init__(self, runs: Runs, units: tuple[int, ...]) -> None:
        self.units = units
        self.reads = reduce(or_, (runs.reads[unit] for unit in units), 0)
        self.makes = reduce(or_, (runs.makes[unit] for unit in units), 0)


class Runs:
    """All that runs of the units of one program.

    Args:
        units: the units in the order of forward.
        sizes: bytes of each storage; those from outside come last.
        own: number of the others.

    Attributes:
        makers: the unit that makes each storage.
        bits: the bit of each storage, by its number: those from outside come last, and -1 is the very last.
        reads, makes: the storages that each unit reads and makes, as bits.
        outside: the storages from outside, as bits.
    """

    def __init__(self, units: Sequence[Unit], sizes: Sequence[int], own: int) -> None:
        self.units, self._sizes = units, sizes
        self.bits = [1 << place for place in range(len(sizes))]
        self.outside = sum(self.bits[own:])
        self.reads = [self.bits_of(unit.reads) for unit in units]
        self.makes = [self.bits_of(unit.makes) for unit in units]
        maker = {storage: index for index, unit in enumerate(units) for storage in unit.makes}
        self.makers = tuple(maker[storage] for storage in range(own))

    def bits_of(self, storages: Iterable[int]) -> int:
        """Return a set of storages as bits; one from outside has a negative number."""
        return reduce(or_, map(self.bits.__getitem__, storages), 0)

    def storages_in(self, bits: int) -> Sequence[int]:
        """Return the numbers of the storages of a set."""
        own, count = len(self.makers), len(self._sizes)
        return [each if each < own else each - count for each in _places(bits)]

    def each_of(self, bits: int) -> Iterator[int]:
        """Yield the storages of a set, those from outside first, each as bits."""
        return map(self.bits.__getitem__, sorted(self.storages_in(bits)))

    def making(self, wanted: int, there: int) -> tuple[int, ...]:
        """Return the units, in order, that make what is wanted from what is there, both as bits."""
        units: list[int] = []
        absent = ~(there | self.outside)
        lacking = wanted & absent
        while lacking:
            unit = self.makers[lacking.bit_length() - 1]
            units.append(unit)
            absent &= ~self.makes[unit]
            lacking = (lacking | self.reads[unit]) & absent
        return tuple(sorted(units))


def _places(bits: int) -> Iterator[int]:
    while bits:
        place = bits.bit_length() - 1
        yield place
        bits ^= 1 << place
