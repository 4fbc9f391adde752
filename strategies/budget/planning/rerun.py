"""The bytes and the work of a block that a checkpoint recomputes as a whole, like `ac=full`, without a tape.

Forward holds the inputs, and the state of torch's generator, until the graph has let go of all that it has
saved. When backward first asks for anything, Python code of the block runs again up to the last tensor that
autograd saves. All of these are there then; a node that asks for one holds it until it is done, also one that
a tape would make later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from strategies.budget.planning.block_program import PlannedCall
from strategies.budget.planning.simulation import Effect
from strategies.estimate.machine import PYTHON_S
from strategies.estimate.operator_cost import machine_for
from strategies.step.step_graph import BlockCall, StepGraph, StepOperator


@dataclass(frozen=True, kw_only=True, slots=True)
class Rerun:
    """A second forward of a call, as a whole.

    Fields:
        start: moment before its forward.
        asked: moment at which it runs again.
        released: last moment at which the graph holds anything of it.
        units: units of the call's program that begin to run again.
        flops, seconds: their work, and that of the checkpoint.
        peak_bytes: most bytes that there are more while it runs again.
        saved: last moment and bytes of each storage that is there then.
        given: each input that is held longer: last moments without and with that, and bytes.
    """

    start: int
    asked: int
    released: int
    units: tuple[int, ...]
    flops: int
    seconds: float
    peak_bytes: int
    saved: tuple[tuple[int, int], ...]
    given: Mapping[int, tuple[int, int, int]]

    def effect(self, random_state_bytes: int) -> Effect:
        """Return what it changes.

        Args:
            random_state_bytes: bytes on the device of the state of torch's generator.
        """
        gains = Counter[int]()
        for last, until, nbytes in (*self.given.values(), (self.start, self.released, random_state_bytes)):
            gains[last + 1] += nbytes
            gains[until + 1] -= nbytes
        gains[self.asked + 1] += sum(nbytes for _, nbytes in self.saved)
        for last, nbytes in self.saved:
            gains[last + 1] -= nbytes
        return Effect(
            gains=gains,
            peaks={self.asked: self.peak_bytes + random_state_bytes},
            flops=self.flops,
            seconds=self.seconds,
            runs=self.units,
            inputs=self.given,
        )


def rerun_of(graph: StepGraph, number: int, calls: Sequence[PlannedCall]) -> Rerun | None:
    """Return how a call runs again as a whole; `None` where it may not, or nobody could tell its bytes.

    Args:
        number: number of the call.
        calls: all calls of the step.
    """
    call = graph.calls[number]
    own = [graph.operators[index] for index in call.operators[len(call.before) :]]
    facts = call.checkpointed
    made = {storage for each in own for storage in each.makes}
    outside = {s for each in own for s in each.reads} - made
    if (
        facts.asked is None
        or not _may_run(graph, call, own, facts.asked)
        or _is_written(graph, call, own, outside)
    ):
        return None
    again = [each for each in own if each.ordinal < facts.operators + len(call.before)]
    end = len(graph.held_bytes) - 1
    outside |= {each.storage for each in (*call.redemptions, *call.shared)} - made
    if any(graph.deaths[s] < end for s in outside - facts.given - graph.gathered):
        return None
    given = [s for s in facts.given if graph.deaths[s] < facts.released]
    if any(_is_others(graph, storage, number, calls) for storage in given):
        return None
    held = {storage: (graph.deaths[storage], facts.released, graph.nbytes[storage]) for storage in given}
    until: dict[int, int] = {}
    for each in call.redemptions:
        if each.storage in made:
            until[each.storage] = max(each.node_until, until.get(each.storage, -1))
    units = calls[number].program.units
    ordinals, again_s = {each.ordinal for each in again}, sum(each.seconds for each in again)
    machine = machine_for(torch.device(graph.device))
    return Rerun(
        start=own[0].start if own else call.start,
        asked=facts.asked,
        released=facts.released,
        units=tuple(index for index, unit in enumerate(units) if unit.operators[0] in ordinals),
        flops=sum(each.flops for each in again),
        seconds=again_s + machine.not_hidden_s(PYTHON_S["region"] + PYTHON_S["again"] * len(again), again_s),
        peak_bytes=max(_totals(graph, call, again, until.keys()), default=0),
        saved=tuple((last, graph.nbytes[storage]) for storage, last in until.items()),
        given=held,
    )


def _may_run(graph: StepGraph, call: BlockCall, own: Sequence[StepOperator], asked: int) -> bool:
    """Say whether a call's forward may run twice: it changes nothing."""
    made = {storage for each in own for storage in each.makes}
    is_alone = sum(each.fqn == call.fqn for each in graph.calls) == 1
    is_plain = not (call.modules or call.stays_because or call.unasked) and asked >= call.end
    return (
        call.checkpointed.is_possible
        and not call.checkpointed.waiting
        and not graph.stages
        and is_alone
        and is_plain
        and all(each.is_repeatable and each.writes <= made for each in own)
    )


def _is_written(
    graph: StepGraph, call: BlockCall, own: Sequence[StepOperator], outside: Collection[int]
) -> bool:
    """Say whether others write to what a call reads, such as its weights, before it runs again."""
    asked = call.checkpointed.asked
    inside = set(map(id, own))
    later = (each for each in graph.operators if each.end > call.start and id(each) not in inside)
    written = {s for each in later if asked is None or each.start < asked for s in each.writes}
    return not written.isdisjoint(call.checkpointed.given.union(outside) - graph.gathered)


def _is_others(graph: StepGraph, storage: int, number: int, calls: Sequence[PlannedCall]) -> bool:
    """Say whether a tape of another call may hold a storage longer than the step does, too."""
    for other, call in enumerate(calls):
        if other == number:
            continue
        if (
            storage in call.outer_storages
            and max((*call.until, *call.released), default=-1) > graph.deaths[storage]
        ):
            return True
        if storage in call.storages:
            own = call.storages.index(storage)
            program = call.program
            if own in program.saved or any(own in unit.reads for unit in program.units):
                return True
    return False


def _totals(
    graph: StepGraph, call: BlockCall, again: Sequence[StepOperator], saved: Container[int]
) -> Iterator[int]:
    """Yield the bytes while operators run again: what backward does not read dies where it did in forward."""
    live: set[int] = set()
    dying: list[tuple[int, int]] = []  # last moments of those that backward does not read, the first on top
    total = 0
    for each in again:
        while dying and dying[0][0] < each.start:
            _, storage = heappop(dying)
            live.remove(storage)
            total -= graph.nbytes[storage]
        for storage in {*each.makes, *each.others} - live:
            live.add(storage)
            total += graph.nbytes[storage]
            if storage not in saved:
                heappush(dying, (max(graph.deaths[storage], call.dropped.get(storage, -1)), storage))
        yield total
