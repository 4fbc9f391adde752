"""Chains: blocks in a row that are planned as one, so that what one makes for the next is made again, too.

A block alone holds its input, whatever that costs to make. In a chain the input of each block but the first
is a value like others: kept, made again once, or anew for each request, by operators of all blocks before it.
One tape follows the blocks of a chain, so a chain is a call of a block as simulation knows it.

What several blocks ask for, autograd holds as ever where each is alone. Of what a chain has made, only what
blocks outside of it ask for is held so; `PlannedCall.gains` has the bytes that are not held any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from strategies.budget.planning.block_options import CallOptions, Option
from strategies.budget.planning.block_program import BlockProgram, PlannedCall, planned_call
from strategies.budget.planning.simulation import Decision
from strategies.budget.planning.units import Run
from strategies.step.step_graph import BlockCall, StepGraph, StepOperator, is_written

_MOST_BLOCKS, _MOST_UNITS = 8, 240
"""Blocks of a chain, and units of them all: the search takes as long as for one block of so many units."""

_JOINED = 12
"""Decisions of the blocks alone that are tried as one: without them the smallest peaks were higher."""

_SMALLEST_LINK = 0.02
"""Bytes of a value that is handed on and worth making again, as a share of the largest of both blocks."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive blocks that can be planned as one.

    Fields:
        start, end: numbers of the first block and of the one behind the last.
        caller: finds its options.
    """

    start: int
    end: int
    caller: CallOptions


class Chains:
    """The chains of a step.

    Args:
        graph: the step.
        callers: its calls.
        options: the options of each call alone.
        caller_of: makes what finds the options of a chain, from its call and decisions to begin with.
    """

    def __init__(
        self,
        graph: StepGraph,
        callers: Sequence[CallOptions],
        options: Sequence[Sequence[Option]],
        caller_of: Callable[..., CallOptions],
    ) -> None:
        self._graph, self._callers, self._options, self._caller_of = graph, callers, options, caller_of
        self._count = Counter(call.fqn for call in graph.calls)

    def all(self) -> Iterator[Chain]:
        """Yield the chains in which each block is handed something that is worth making again."""
        for start, end in self._spans():
            calls = self._graph.calls[start:end]
            own = {index for call in calls for index in call.operators}
            units = sum(len(caller.call.program.units) for caller in self._callers[start:end])
            if units <= _MOST_UNITS and not is_written(self._graph.operators, own, calls[-1].end):
                call = chained_call(self._graph, start, end)
                alone = [caller.call for caller in self._callers[start:end]]
                known = _joined(call, alone, self._options[start:end])
                yield Chain(start, end, self._caller_of(call, known=list(known)))

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield spans of blocks each of which follows the one before: all in a row, and halves of them.

        A block is in one span of each length, so that the search takes as long as that for blocks alone.
        """
        count, begin = len(self._callers), 0
        for index in range(1, count + 1):
            if index < count and self._follows(index):
                continue
            length = min(index - begin, _MOST_BLOCKS)
            lengths = {length, (length + 1) // 2} - {1}
            for each in sorted(lengths, reverse=True):
                yield from ((at, min(at + each, index)) for at in range(begin, index - 1, each))
            begin = index

    def _is_possible(self, index: int) -> bool:
        """Say whether a call may be in a chain."""
        call, program = self._graph.calls[index], self._callers[index].call.program
        is_alone = self._count[call.fqn] == 1 and not call.modules and not call.stays_because
        return is_alone and bool(program.asked) and not program.asks_in_forward

    def _follows(self, index: int) -> bool:
        """Say whether a call and the one before it may be in a chain, and gain something."""
        if not (self._is_possible(index) and self._is_possible(index - 1)):
            return False
        before, after = self._callers[index - 1].call, self._callers[index].call
        call = self._graph.calls[index]
        asked = {each.storage for each in (*call.redemptions, *call.shared)}
        asked.update(map(after.number_of, _read_for_nothing(after.program)))
        programs = before.program, after.program
        least = _SMALLEST_LINK * max(size for program in programs for size in program.nbytes)
        links, *others = (
            [_price(program, storage) for storage in among if program.nbytes[storage] >= max(least, 1)]
            for program, among in (
                (before.program, [number for number, each in enumerate(before.storages) if each in asked]),
                *((program, program.saved) for program in programs),
            )
        )
        dearest = max((price for each in others for price in each if isfinite(price)), default=0.0)
        return min(links, default=inf) < dearest or 0.0 in links


def _joined(
    chain: PlannedCall, calls: Sequence[PlannedCall], options: Sequence[Sequence[Option]]
) -> Iterator[Decision]:
    """Yield decisions of the blocks alone as one, from the cheapest to the dearest.

    What blocks hand on is not kept, and made anew for each request where it may be.
    """
    program, number = chain.program, {storage: at for at, storage in enumerate(chain.storages)}
    handed = frozenset(number[each] for call in calls[1:] for each in call.outer_storages if each in number)
    for part in range(_JOINED):
        chosen = [own[part * (len(own) - 1) // (_JOINED - 1)].decision for own in options]
        kept = [
            call.program.saved if decision.is_plain else decision.keep
            for call, decision in zip(calls, chosen, strict=True)
        ]
        keep = _in_chain(number, calls, kept) - handed | program.pinned
        again = _in_chain(number, calls, [decision.again for decision in chosen]) | handed
        keep = program.completed(keep)
        yield Decision(keep=keep, again=(again & program.fleeting) - keep)


def _in_chain(
    number: Mapping[int, int], calls: Sequence[PlannedCall], storages: Sequence[frozenset[int]]
) -> frozenset[int]:
    """Return storages of calls, by their numbers in the chain."""
    pairs = zip(calls, storages, strict=True)
    stepwise = (call.storages[each] for call, own in pairs for each in own)
    return frozenset(number[each] for each in stepwise if each in number)


def _read_for_nothing(program: BlockProgram) -> Iterator[int]:
    """Yield what a block reads from outside to make what autograd saves without FLOPs."""
    runs = program.runs
    costly = runs.bits_of(each for unit in program.units if unit.flops for each in unit.makes)
    free = Run(runs, runs.making(program.saved_bits, costly))
    return (each for each in runs.storages_in(free.reads & runs.outside))


def _price(program: BlockProgram, storage: int) -> float:
    """Return the FLOPs that a byte costs to make of what autograd saves otherwise; endless if none may.

    None, where it follows without FLOPs from that and from fewer bytes that can be kept in its place.
    """
    runs, wanted = program.runs, program.runs.bits_of([storage])
    saved = runs.bits_of(program.saved - {storage})
    units = [program.units[unit] for unit in runs.making(wanted, saved)]
    is_lasting = storage in program.pinned | program.older
    if is_lasting or not all(unit.is_repeatable for unit in units):
        return inf
    if not units[-1].flops:
        costly = runs.bits_of(each for unit in units if unit.flops for each in unit.makes)
        free = Run(runs, runs.making(wanted, saved | costly))
        if sum(map(program.nbytes_of, runs.storages_in(free.reads & costly))) < program.nbytes[storage]:
            return 0.0
    return sum(unit.flops for unit in units) / sum(step.made_bytes for step in units[-1].steps)


def chained_call(graph: StepGraph, start: int, end: int) -> PlannedCall:
    """Return the calls of blocks from `start` to the one before `end` as one call of the step."""
    calls = graph.calls[start:end]
    made = {storage for call in calls for index in call.operators for storage in graph.operators[index].makes}
    deaths = dict(graph.deaths)
    gains = Counter[int]()
    for storage in made & graph.unshared.keys():
        others = (*graph.calls[:start], *graph.calls[end:])
        asked = (each.held_until for call in others for each in call.shared if each.storage == storage)
        deaths[storage] = max([graph.unshared[storage], *asked])
        gains[deaths[storage] + 1] -= graph.nbytes[storage]
        gains[graph.deaths[storage] + 1] += graph.nbytes[storage]
    asked_inside = [each for call in calls for each in call.shared if each.storage in made]
    operators = list(_numbered(graph, calls))
    whole = BlockCall(
        fqn=f"{calls[0].fqn} to {calls[-1].fqn}",
        start=calls[0].start,
        end=calls[-1].end,
        operators=list(range(len(operators))),
        redemptions=[*(each for call in calls for each in call.redemptions), *asked_inside],
        inputs=calls[0].inputs,
        unasked=set().union(*(call.unasked for call in calls)),
        dropped={storage: until for call in calls for storage, until in call.dropped.items()},
    )
    found = planned_call(replace(graph, operators=operators, deaths=deaths), whole)
    changes = tuple(sorted(item for item in gains.items() if item[1]))
    return replace(found, gains=changes, ends=tuple(call.end for call in calls))


def _numbered(graph: StepGraph, calls: Sequence[BlockCall]) -> Iterator[StepOperator]:
    """Yield the operators of a chain, numbered in it.

    Those that read parameters which sharding takes away after forward do not run before backward of their
    own block, so that none but those of the last block run again.
    """
    ordinal = 0
    for call in calls:
        for index in call.operators:
            operator = graph.operators[index]
            is_there = call is calls[-1] or operator.reads.isdisjoint(graph.gathered)
            yield replace(operator, ordinal=ordinal, is_repeatable=operator.is_repeatable and is_there)
            ordinal += 1
