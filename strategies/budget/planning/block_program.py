"""The programs of blocks: what can be kept, what runs again, and what autograd asks for.

Storages of a block are numbered in the order in which they are made, from 0; those from outside are negative.
Some of these are inputs that a plan may move to the host; none is made again.
One that is written to after others have read it counts once for each of its *contents* (`call_contents`).
Blocks whose calls do the same have equal programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

from strategies.budget.plan import Value, input_value
from strategies.budget.planning.call_contents import Contents, units_of
from strategies.budget.planning.units import Run, Runs, Unit
from strategies.step.step_graph import BlockCall, StepGraph

_SMALLEST_FLEETING = 0.02
"""Bytes of a storage that is made anew for each reader, as a share of the largest of the block."""


_STEPS_OF_LOOP = 8
"""Storages alike from which on they are of a loop."""

_STRIDES = (2, 4, 8)
"""Distances between steps of a loop whose storages stay."""


@dataclass(frozen=True, kw_only=True)
class BlockProgram:
    """The units of a block's forward, in order, and the storages that backward asks for, in order.

    Fields:
        units: units in the order of forward.
        nbytes: bytes of each storage of the block.
        outer_nbytes: bytes of each storage from outside, -1 first.
        asked: storages in the order in which nodes of autograd ask for them; one may come several times.
        values: addresses of the storages.
        inputs: addresses of inputs that can wait on the host, by number.
        operators: number of operators of forward.
        pinned: storages that stay in every plan: autograd holds them and does not ask for them.
        older: contents that forward writes over: no plan keeps one that the block makes.
        asks_in_forward: forward itself goes backward, and asks for some of them then.
    """

    units: tuple[Unit, ...]
    nbytes: tuple[int, ...]
    outer_nbytes: tuple[int, ...]
    asked: tuple[int, ...]
    values: tuple[Value, ...] = field(repr=False)
    inputs: tuple[tuple[int, Value], ...] = ()
    operators: int
    pinned: frozenset[int] = frozenset()
    older: frozenset[int] = frozenset()
    asks_in_forward: bool = False

    @cached_property
    def runs(self) -> Runs:
        """All that runs of the units, and their bytes meanwhile."""
        return Runs(self.units, self.sizes, len(self.nbytes))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each storage, by its number: those from outside come last, and -1 is the very last."""
        return *self.nbytes, *reversed(self.outer_nbytes)

    @cached_property
    def asked_inside(self) -> tuple[tuple[int, int, int], ...]:
        """The requests for storages of the block: number, storage, and that as a set of bits."""
        asked = enumerate(self.asked)
        return tuple((index, storage, 1 << storage) for index, storage in asked if storage >= 0)

    @cached_property
    def random_units(self) -> tuple[int, ...]:
        """The units that draw random numbers."""
        return tuple(index for index, unit in enumerate(self.units) if unit.random_states)

    @cached_property
    def saved(self) -> frozenset[int]:
        """The storages of the block that autograd saves."""
        return frozenset(storage for storage in self.asked if storage >= 0)

    @cached_property
    def written(self) -> frozenset[int]:
        """The contents that writes to others begin."""
        return frozenset(storage for storage, value in enumerate(self.values) if value.is_written)

    @cached_property
    def saved_bits(self) -> int:
        """The same, as bits."""
        return self.runs.bits_of(self.saved)

    @cached_property
    def movable(self) -> frozenset[int]:
        """The storages that can wait on the host."""
        own = frozenset(storage for storage, size in enumerate(self.nbytes) if size)
        own -= self.pinned | self.older
        return own.union(number for number, _ in self.inputs)

    def nbytes_of(self, storage: int) -> int:
        """Return the bytes of a storage, be it from outside."""
        return self.nbytes[storage] if storage >= 0 else self.outer_nbytes[-1 - storage]

    def value_of(self, storage: int) -> Value:
        """Return the address of a storage of the block, or of one of `inputs`."""
        return self.values[storage] if storage >= 0 else dict(self.inputs)[storage]

    @cached_property
    def fleeting(self) -> frozenset[int]:
        """The storages that can be made anew for each reader: they have several, and are not small.

        None where forward itself goes backward: what it asks for then is there, and is not made anew.
        """
        return self._made_anew(is_chain=False)

    @cached_property
    def fleeting_chains(self) -> frozenset[int]:
        """The same with what such storages are made of: who makes one anew reads its operands as often."""
        return self._made_anew(is_chain=True)

    def _made_anew(self, *, is_chain: bool) -> frozenset[int]:
        readers = Counter((*self.asked, *(storage for unit in self.units for storage in unit.reads)))
        often = {storage for storage, count in readers.items() if count > 1}
        least, found, known = _SMALLEST_FLEETING * max(self.nbytes, default=0), set[int](), -1
        while known < len(found):  # one that goes on in place may read what a later one has made
            known = len(found)
            for unit in reversed(self.units):
                several = {each for each in unit.makes if each in often and self.nbytes[each] > least}
                if several and unit.is_repeatable:
                    found |= several
                    often.update(unit.reads if is_chain else ())
        return frozenset() if self.asks_in_forward else frozenset(found) - self.pinned

    @cached_property
    def droppable(self) -> frozenset[int]:
        """The storages that may be dropped between requests, and are not small: one operator makes each.

        None where forward itself goes backward, as of `fleeting`.
        """
        least = _SMALLEST_FLEETING * max(self.nbytes, default=0)
        units = [unit for unit in self.units if unit.is_repeatable and len(unit.operators) == 1]
        found = {each for unit in units for each in unit.makes if self.nbytes[each] > least}
        return frozenset() if self.asks_in_forward else frozenset(found) - self.pinned - self.older

    def made_beside(self, storages: int) -> int:
        """Return what must be there, so that all who need some storages are known, all as bits.

        A residual stream is added in place to what a batch norm made. The executor makes no sum for who asks
        for the mean; the unit does. A drop counts the requests that need a storage: the mean is kept.
        """
        return reduce(or_, (made for needed, made in self._made_beside if needed & storages), 0)

    @cached_property
    def _made_beside(self) -> tuple[tuple[int, int], ...]:
        """Operands of the last operators of units and all that they follow from, and what is made before."""
        found = []
        for unit in self.units:
            steps = iter(unit.steps)
            made = next((step.made for step in steps if step.made), ())
            late = self.runs.bits_of(each for step in steps for each in step.reads if each >= 0)
            if late:
                run = Run(self.runs, self.runs.making(late, 0))
                found.append((late | run.reads, self.runs.bits_of(made)))
        return tuple(found)

    def unsaved_operands(self, storages: int) -> int:
        """Return what some storages are made of, back to what autograd saves, all as bits."""
        if storages not in self._operands:
            made = Run(self.runs, self.runs.making(storages, self.saved_bits & ~storages)).makes
            self._operands[storages] = made & ~(self.saved_bits | storages)
        return self._operands[storages]

    @cached_property
    def _operands(self) -> dict[int, int]:
        return {}

    @cached_property
    def alike(self) -> tuple[frozenset[int], ...]:
        """Sets of storages that decisions try together: each alone, and of a loop those of many steps.

        Those of a loop are tried all, halves of them, and all but every second, fourth or eighth.
        """
        return tuple(frozenset(part) for kind in self.kinds for part in _parts(kind))

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """Storages that are made, read and asked for by operators of the same names, in order."""
        readers: dict[int, list[str]] = {}
        for unit in self.units:
            for storage in unit.reads:
                readers.setdefault(storage, []).append(unit.name)
        asked = Counter(self.asked)
        kinds: dict[object, list[int]] = {}
        for storage, maker in enumerate(self.runs.makers):
            unit = self.units[maker]
            ends = unit.name, tuple(sorted(readers.get(storage, ()))), asked[storage]
            size = self.nbytes[storage], storage in self.older
            kinds.setdefault((ends, unit.flops, size), []).append(storage)
        return tuple(map(tuple, kinds.values()))

    @cached_property
    def _is_repeatable(self) -> bool:
        return all(unit.is_repeatable for unit in self.units)

    def completed(self, keep: frozenset[int]) -> frozenset[int]:
        """Return `keep` with what could only be made by units that may not run again."""
        runs = self.runs
        return frozenset(runs.storages_in(self.completed_bits(runs.bits_of(keep), 0)))

    def completed_bits(self, keep: int, moved: int) -> int:
        """Return the same of bits.

        Args:
            keep: storages that stay.
            moved: storages that wait on the host.
        """
        if self._is_repeatable:
            return keep
        run = Run(self.runs, self.runs.making(self.saved_bits, keep | moved))
        last = next((unit for unit in reversed(run.units) if not self.units[unit].is_repeatable), None)
        if last is None:
            return keep
        return self.completed_bits(
            keep | (self.saved_bits | run.reads) & self.runs.makes[last] & ~moved, moved
        )


def _parts(alike: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the sets of some storages alike, in order, that decisions try together."""
    if len(alike) < _STEPS_OF_LOOP:
        yield from ([storage] for storage in alike)
        return
    yield from (alike, alike[: len(alike) // 2], alike[len(alike) // 2 :])
    for stride in _STRIDES:
        yield [storage for number, storage in enumerate(alike, 1) if number % stride]


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """One call of a block: its program, and when in the step it happens.

    Fields:
        fqn: plain FQN of the block.
        program: what it does.
        start, end: moments between which forward runs.
        starts: moment before each unit's first operator.
        deaths: the last moment at which forward itself has each storage.
        asked: moment of each request of backward.
        until: the last moment at which the node that asked holds the value.
        released: the last moment at which the graph holds what autograd has saved.
        nodes: names of these nodes.
        outer_deaths: the last moment at which each storage from outside lives, -1 first.
        storages, outer_storages: numbers of its storages in the step, and of those from outside, -1 first.
        dropped: the last moment at which the graph holds what it saves for nothing, where no tape does.
        gains: bytes more from a moment on than where each block of it is a call, by moment.
        ends: moments at which the blocks of a chain end; none of a block alone.
    """

    fqn: str
    program: BlockProgram
    start: int
    end: int
    starts: tuple[int, ...]
    deaths: tuple[int, ...]
    asked: tuple[int, ...]
    until: tuple[int, ...]
    released: tuple[int, ...]
    nodes: tuple[str, ...]
    outer_deaths: tuple[int, ...]
    storages: tuple[int, ...]
    outer_storages: tuple[int, ...]
    dropped: Mapping[int, int]
    gains: tuple[tuple[int, int], ...] = ()
    ends: tuple[int, ...] = ()

    @cached_property
    def passing(self) -> tuple[tuple[int, int], ...]:
        """Units, each with a storage from outside that it reads and that dies before the call ends.

        `torch.tensor` has made it of numbers of Python, or a model lets it go between blocks of a chain.
        """
        return tuple(
            (unit, storage)
            for unit, each in enumerate(self.program.units)
            for storage in each.reads
            if storage < 0 and self.all_deaths[storage] < self.end
        )

    @cached_property
    def all_deaths(self) -> tuple[int, ...]:
        """The last moment at which forward has each storage, those from outside last: -1 is the very last."""
        return *self.deaths, *reversed(self.outer_deaths)

    @cached_property
    def asked_until(self) -> dict[int, int]:
        """The last moment at which nodes hold each storage that they ask for by a ticket."""
        found: dict[int, int] = {}
        for storage, until in zip(self.program.asked, self.until, strict=True):
            found[storage] = max(until, found.get(storage, -1))
        return found

    @cached_property
    def nodes_until(self) -> dict[int, int]:
        """The same, if autograd saves all of them itself."""
        found = dict(self.asked_until)
        for storage, released in zip(self.program.asked, self.released, strict=True):
            found[storage] = max(released, found[storage])
        return found

    @cached_property
    def graph_until(self) -> dict[int, int]:
        """The same, with what it saves for nothing."""
        until = self.nodes_until
        return until | {each: max(last, until.get(each, -1)) for each, last in self.dropped.items()}

    @cached_property
    def tickets_until(self) -> dict[int, int]:
        """The same, if it has tickets for the storages of the block."""
        return self.nodes_until | {each: until for each, until in self.asked_until.items() if each >= 0}

    def number_of(self, storage: int) -> int:
        """Return the number in the step of a storage, be it from outside."""
        return self.storages[storage] if storage >= 0 else self.outer_storages[-1 - storage]


def planned_call(graph: StepGraph, call: BlockCall) -> PlannedCall:
    """Return program and moments of one call."""
    operators = [graph.operators[index] for index in call.operators]
    redemptions = sorted(call.redemptions, key=lambda each: each.moment)
    asks_in_forward = any(each.moment < call.end for each in redemptions)
    found = Contents(operators, parts=not asks_in_forward)
    asked = [found.latest(each.storage) for each in redemptions]
    numbers = found.numbered(asked)
    own = {content: content.value for content in numbers if content.value is not None}
    outside = [content for content in numbers if content.value is None]
    last = {content.storage: number for content, number in numbers.items() if content.over is None}
    made = {content.storage for content in own}
    program = BlockProgram(
        units=tuple(units_of(found.groups, numbers, graph.nbytes)),
        nbytes=tuple(graph.nbytes[content.storage] for content in own),
        outer_nbytes=tuple(graph.nbytes[content.storage] for content in outside),
        asked=tuple(map(numbers.__getitem__, asked)),
        values=tuple(own.values()),
        inputs=tuple(
            (last[storage], input_value(number))
            for storage, number in call.inputs.items()
            if storage in last and graph.nbytes[storage]
        ),
        operators=len(operators),
        pinned=frozenset(map(numbers.__getitem__, found.pinned()))
        | {last[storage] for storage in call.unasked & made},
        older=frozenset(number for content, number in numbers.items() if content.over),
        asks_in_forward=asks_in_forward,
    )
    return PlannedCall(
        fqn=call.fqn,
        program=program,
        start=call.start,
        end=call.end,
        starts=tuple(group[0].operator.start for group in found.groups),
        deaths=tuple(content.death(graph.deaths) for content in own),
        asked=tuple(each.moment for each in redemptions),
        until=tuple(each.until for each in redemptions),
        released=tuple(each.released for each in redemptions),
        nodes=tuple(each.node for each in redemptions),
        outer_deaths=tuple(content.death(graph.deaths) for content in outside),
        storages=tuple(content.number(len(graph.nbytes)) for content in own),
        outer_storages=tuple(content.number(len(graph.nbytes)) for content in outside),
        dropped={last[storage]: until for storage, until in call.dropped.items() if storage in made},
    )
