"""Units of blocks: operators that run again together, which of them must run, and their bytes meanwhile.

Most decisions that a search tries differ in one storage, so nearly all that runs for a request of one has run
for another. Sets of storages are whole numbers here, with a bit for each by its place in the sizes of the
program: what runs is found by operations on these, and remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

_MOST_KNOWN = 1 << 15
"""Results that are remembered of one program; then all of them are found anew."""


class UnitStep(NamedTuple):
    """One operator of a unit.

    Fields:
        ordinal: its ordinal.
        made_bytes, private_bytes: bytes that it makes, and that it makes and frees on top.
        random_states: states of generators that are stashed for it.
        reads, made: storages that the unit reads, and makes, for which this is its last operator.
    """

    ordinal: int
    made_bytes: int
    private_bytes: int
    random_states: int
    reads: tuple[int, ...]
    made: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Operators that run again together: one that makes storages, and those that write to them.

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

    @property
    def may_run_often(self) -> bool:
        """True if it may run several times: it draws no random numbers."""
        return self.is_repeatable and not self.random_states


class Run:
    """Units that run one after the other, for a request of backward or in the second forward of a group.

    Attributes:
        units: their numbers, in order.
        bits: the same, as bits.
        reads, makes: the storages that they read and make, as bits.
    """

    def __init__(self, runs: Runs, units: tuple[int, ...]) -> None:
        self.units, self._runs = units, runs
        self.bits = sum(1 << unit for unit in units)
        self.reads = reduce(or_, (runs.reads[unit] for unit in units), 0)
        self.makes = reduce(or_, (runs.makes[unit] for unit in units), 0)
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}

    def bytes_meanwhile(
        self, superfluous: int, freed: int, fetched: int, stashed: int, random_state_bytes: int
    ) -> tuple[int, int]:
        """Return the most bytes that there are more while the units run, and those at their end.

        Args:
            superfluous: storages that are freed as soon as they are made, as bits.
            freed: storages that are freed when the last of these units has read them.
            fetched: storages that come from the host, for the first unit that reads them or else at the end.
            stashed: units that run once more, so that states of generators stay for them.
            random_state_bytes: bytes on the device of one such state.
        """
        key = superfluous & self.makes, freed & self.reads, fetched, stashed & self.bits, random_state_bytes
        if key not in self._known:
            self._known[key] = self._followed(*key)
            self._runs.count += 1
        return self._known[key]

    def _followed(
        self, superfluous: int, freed: int, fetched: int, stashed: int, random_state_bytes: int
    ) -> tuple[int, int]:
        bytes_of = self._runs.bytes_of
        live = peak = 0
        for unit, step, reads, makes, read_last in self._steps:
            if fetched & reads:
                live += bytes_of(fetched & reads)
                fetched &= ~reads
            live += step.made_bytes
            peak = max(peak, live + step.private_bytes + (random_state_bytes if step.random_states else 0))
            if step.random_states and not stashed >> unit & 1:
                live -= step.random_states * random_state_bytes
            gone = makes & superfluous | read_last & freed
            if gone:
                live -= bytes_of(gone)
        live += bytes_of(fetched)
        return max(peak, live), live

    @cached_property
    def _steps(self) -> Sequence[tuple[int, UnitStep, int, int, int]]:
        """Each operator, in order, with the number of its unit and sets of storages.

        They are those that the unit reads, if this is its first operator; that are made; and that nobody
        reads after it.
        """
        steps, found, later = [each for unit in self.units for each in self._runs.steps[unit]], [], 0
        if len(steps) > len(self.units):
            steps.sort(key=lambda each: each[1].ordinal)
        for unit, step, begins, makes, reads in reversed(steps):
            found.append((unit, step, begins, makes, reads & ~later))
            later |= reads
        return found[::-1]


class Runs:
    """All that runs of the units of one program.

    Args:
        units: the units in the order of forward.
        sizes: bytes of each storage; those from outside come last.
        own: number of the others.

    Attributes:
        makers: the unit that makes each storage.
        steps: the operators of each unit: its number; itself; what the unit reads, if it is the first; what
            the unit makes, and reads, with it as the last.
        bits: the bit of each storage, by its number: those from outside come last, and -1 is the very last.
        reads, makes: the storages that each unit reads and makes, as bits.
        outside: the storages from outside, as bits.
        nothing: the run of no unit.
        count: number of results that are remembered.
    """

    def __init__(self, units: Sequence[Unit], sizes: Sequence[int], own: int) -> None:
        self.units, self._sizes = units, sizes
        self.bits = [1 << place for place in range(len(sizes))]
        self.outside = sum(self.bits[own:])
        self.reads = [self.bits_of(unit.reads) for unit in units]
        self.makes = [self.bits_of(unit.makes) for unit in units]
        self.steps = [
            [
                (at, step, 0 if number else self.reads[at], self.bits_of(step.made), self.bits_of(step.reads))
                for number, step in enumerate(unit.steps)
            ]
            for at, unit in enumerate(units)
        ]
        maker = {storage: index for index, unit in enumerate(units) for storage in unit.makes}
        self.makers = tuple(maker[storage] for storage in range(own))
        self.count = 0
        self.nothing = Run(self, ())
        self._known: dict[tuple[int, int], Run] = {}
        self._numbers: dict[int, Sequence[int]] = {}
        self._behind: dict[int, int] = {}  # all that a storage is made of, with itself

    def bits_of(self, storages: Iterable[int]) -> int:
        """Return a set of storages as bits; one from outside has a negative number."""
        return reduce(or_, map(self.bits.__getitem__, storages), 0)

    def storages_in(self, bits: int) -> Sequence[int]:
        """Return the numbers of the storages of a set."""
        if bits not in self._numbers:
            own, count = len(self.makers), len(self._sizes)
            self._numbers[bits] = [each if each < own else each - count for each in _places(bits)]
            self.count += 1
        return self._numbers[bits]

    def each_of(self, bits: int) -> Iterator[int]:
        """Yield the storages of a set, those from outside first, each as bits."""
        return map(self.bits.__getitem__, sorted(self.storages_in(bits)))

    def bytes_of(self, bits: int) -> int:
        """Return the bytes of a set of storages."""
        return sum(map(self._sizes.__getitem__, _places(bits))) if bits else 0

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

    def run(self, storage: int, there: int) -> Run:
        """Return what runs where a storage is asked for.

        Args:
            there: storages that are there, as bits.
        """
        if self.count > _MOST_KNOWN:
            self.count = 0
            self._known.clear()
            self._numbers.clear()
        if storage not in self._behind:
            self._behind[storage] = Run(self, self.making(1 << storage, 0)).makes
        key = storage, there & self._behind[storage]
        if key not in self._known:
            self._known[key] = Run(self, self.making(1 << storage, there))
            self.count += 1
        return self._known[key]


def _places(bits: int) -> Iterator[int]:
    while bits:
        place = bits.bit_length() - 1
        yield place
        bits ^= 1 << place
