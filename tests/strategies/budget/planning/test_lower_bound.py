"""The bound, against the best of all schedules of small steps."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TypeAlias

import numpy as np
import pytest

from strategies.budget.planning.lower_bound import LowerBound
from strategies.budget.planning.recomputation import Maker, Moment, Recomputation
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.small_steps import written_step

Halves: TypeAlias = Mapping[tuple[int, int], int]
"""Halves that an operator touches of a storage: 1, 2 or both, 3, by operator and storage; both of others."""

NO_HALVES: Halves = {}


def chain(blocks: int, *, seed: int) -> StepGraph:
    """Return a chain of forward operators, some of which also read an older value, and its backward."""
    chance = random.Random(seed)
    nbytes = [chance.choice([1, 2, 3]) for _ in range(2 * blocks)]
    forward, backward = [], []
    for index in range(blocks):
        older = [chance.randrange(index)] if index > 1 and chance.random() < 0.5 else []
        forward.append(([*older, *([index - 1] if index else [])], [index], chance.choice([1, 2, 5])))
    for place, index in enumerate(reversed(range(blocks))):
        before = [blocks + place - 1] if place else []
        backward.append(([index, *before], [blocks + place], 0))
    return written_step(*forward, *backward, nbytes=nbytes)


def written_in_halves(values: int, *, seed: int) -> tuple[StepGraph, Halves]:
    """Return a step whose values are written half by half, in place; others read a half of them, or both."""
    chance = random.Random(seed)
    rows: list[tuple[list[int], list[int], int]] = []
    nbytes: list[int] = []
    writes: dict[int, int] = {}
    halves: dict[tuple[int, int], int] = {}

    def add(reads: Mapping[int, int], flops: int, *, makes: int = 0) -> list[int]:
        """Add an operator that reads these halves of storages; return what it makes."""
        made = [len(nbytes)] if makes else []
        nbytes.extend([makes] if makes else [])
        halves.update({(len(rows), storage): half for storage, half in reads.items()})
        rows.append((list(reads), made, flops))
        return made

    known: list[int] = []
    for _ in range(values):
        older = {chance.choice(known): chance.choice([1, 2, 3])} if known else {}
        (value,) = add(older, chance.choice([0, 1, 5]), makes=chance.choice([2, 4]))
        for half in chance.choice([(), (1,), (2, 1)]):
            older = {chance.choice(known): chance.choice([1, 2, 3])} if known else {}
            part = add(older, 5, makes=1) if chance.random() < 0.5 else []
            writes[len(rows)] = value
            add({**dict.fromkeys(part, 3), **({} if part else older), value: half}, 0 if part else 5)
        known.append(value)
    backward = len(rows)
    gradient: dict[int, int] = {}
    for value in reversed(known):
        (made,) = add({**gradient, value: chance.choice([1, 2, 3])}, 0, makes=chance.choice([1, 3]))
        gradient = {made: 3}
    return written_step(*rows, nbytes=nbytes, writes=writes, backward=backward), halves


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What an operator does to the contents of the halves of storages, as bits.

    Fields:
        needs: contents that it reads.
        written: storages that it writes to, all contents of each; one of them is there.
        clears, sets: contents that are gone and there when it has run.
    """

    needs: int
    written: tuple[int, ...]
    clears: int
    sets: int

    def after(self, live: int) -> int | None:
        """Return the contents that are there when it has run; `None` where it cannot."""
        can_run = live & self.needs == self.needs and all(live & contents for contents in self.written)
        return live & ~self.clears | self.sets if can_run else None


def contents_of(graph: StepGraph, halves: Halves) -> tuple[dict[int, int], list[Contents]]:
    """Return all contents of each storage, and what each operator does to them.

    A half has one content when its storage is made, and another one after each write. A reader needs the
    content that it had in the step; a writer needs none.
    """
    writes: Counter[tuple[int, int]] = Counter()
    bit: dict[tuple[int, int, int], int] = {}
    rows = []
    for index, operator in enumerate(graph.operators):
        touched = {s: halves.get((index, s), 3) for s in operator.reads}
        parts = [(s, half) for s, mask in touched.items() for half in (1, 2) if mask & half]
        made = [(s, half) for s in operator.makes for half in (1, 2)]
        written = [part for part in parts if part[0] in operator.writes]
        needs = [(*part, writes[part]) for part in parts if part not in written]
        writes.update(written)
        rows.append((needs, made + written, [(*part, writes[part]) for part in made + written]))
        for content in (*needs, *rows[-1][2]):
            bit.setdefault(content, 1 << len(bit))
    of_half = {part: sum(bit[each] for each in bit if each[:2] == part) for part in {key[:2] for key in bit}}
    of = {s: sum(mask for part, mask in of_half.items() if part[0] == s) for s in graph.nbytes}
    return of, [
        Contents(
            needs=sum(bit[each] for each in needs),
            written=tuple(of[s] for s in operator.writes),
            clears=sum(of_half[part] for part in changed),
            sets=sum(bit[each] for each in sets),
        )
        for operator, (needs, changed, sets) in zip(graph.operators, rows, strict=True)
    ]


def moves(storages: Iterable[int], live: int, host: int) -> Iterator[tuple[int, int]]:
    """Yield what is on the device and on the host after one storage is copied to the other side."""
    for mask in storages:
        yield live, host & ~mask | live & mask
        if host & mask:
            yield live & ~mask | host & mask, host


def best_cost(
    graph: StepGraph, budget_bytes: int, halves: Halves = NO_HALVES, *, host_bytes: int = 0
) -> float:
    """Return the fewest FLOPs run again by any schedule: storages are made, moved and dropped at will."""
    operators = graph.operators
    done = sum(1 << index for index, each in enumerate(operators) if not each.is_forward)
    of, contents = contents_of(graph, halves)

    @cache
    def bytes_of(live: int) -> int:
        return sum(graph.nbytes[storage] for storage, mask in of.items() if live & mask)

    def nexts(cost: int, live: int, host: int, ran: int) -> Iterator[tuple[int, int, int, int]]:
        yield from ((cost, live & ~mask, host, ran) for mask in of.values() if live & mask)
        for index, each in enumerate(contents):
            after = each.after(live)
            if after is not None:
                yield cost + (ran >> index & 1) * operators[index].flops, after, host, ran | 1 << index
        yield from ((cost, *moved, ran) for moved in moves(of.values(), live, host))

    order = count()
    queue = [(0, next(order), 0, 0, 0)]
    seen: dict[tuple[int, int, int], int] = {(0, 0, 0): 0}
    while queue:
        cost, _, live, host, ran = heapq.heappop(queue)
        if ran & done == done:
            return cost
        if seen[live, host, ran] < cost:
            continue
        for following in nexts(cost, live, host, ran):
            fits = bytes_of(following[1]) <= budget_bytes and bytes_of(following[2]) <= host_bytes
            if fits and following[0] < seen.get(following[1:], 1 << 30):
                seen[following[1:]] = following[0]
                heapq.heappush(queue, (following[0], next(order), *following[1:]))
    return np.inf


@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_beats_the_bound(seed: int) -> None:
    graph = chain(5, seed=seed)
    bound = LowerBound(graph)
    total = sum(graph.nbytes.values())
    found = [(best_cost(graph, budget), bound.cost(budget)) for budget in range(3, total + 1, 2)]
    assert all(best >= least for best, least in found)
    assert any(0 < least < np.inf for _, least in found)


@pytest.mark.parametrize("seed", [11, 16, 19, 20, 35, 37])
def test_no_schedule_of_writes_in_place_beats_the_bound(seed: int) -> None:
    graph, halves = written_in_halves(3, seed=seed)
    bound = LowerBound(graph)
    minimum = bound.minimum_bytes()
    budgets = range(minimum, minimum + 8, 2)
    found = [(best_cost(graph, budget, halves), bound.cost(budget)) for budget in budgets]
    assert all(best >= least for best, least in found)
    assert any(0 < least < np.inf for _, least in found)


def test_a_half_that_nobody_wants_is_not_charged_for() -> None:
    rows = [
        ((), (0,), 0),  # one storage, whose halves are two products
        ((), (1,), 100),
        ((1,), (), 0),
        ((), (2,), 100),
        ((2,), (), 0),
        ((0,), (3,), 0),
        ((0,), (4,), 0),
        ((3, 4), (5,), 0),
        ((5,), (6, 7), 0),
        ((7, 0), (8,), 0),  # backward wants the first half
    ]
    nbytes = [10, 5, 5, 5, 1, 5, 12, 5, 5]
    graph = written_step(*rows, nbytes=nbytes, writes={2: 0, 4: 0}, backward=8)
    halves = {(2, 0): 1, (4, 0): 2, (5, 0): 1, (6, 0): 2, (9, 0): 1}
    assert [best_cost(graph, budget, halves) for budget in (21, 22, 32)] == [np.inf, 100, 0]
    assert [LowerBound(graph).cost(budget) for budget in (21, 22, 32)] == [np.inf, 0, 0]


@pytest.mark.parametrize("host_bytes", [1, 3])
@pytest.mark.parametrize("seed", [1, 3])
def test_no_schedule_that_moves_values_to_the_host_beats_the_bound(seed: int, host_bytes: int) -> None:
    graph = chain(4, seed=seed)
    bound = LowerBound(graph)
    budgets = range(bound.minimum_bytes(), sum(graph.nbytes.values()) // 2 + 1)
    alone = [bound.cost(budget) for budget in budgets]
    least = [bound.cost(budget, host_bytes) for budget in budgets]
    best = [best_cost(graph, budget, host_bytes=host_bytes) for budget in budgets]
    assert all(a >= b for a, b in zip(best, least, strict=True))
    assert all(a >= b for a, b in zip(alone, least, strict=True))
    assert alone != least


def test_seven_operators_each_way() -> None:
    graph = chain(7, seed=1)
    assert best_cost(graph, 9) >= LowerBound(graph).cost(9) > 0


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_has_a_smaller_peak_than_the_minimum(seed: int) -> None:
    graph = chain(4, seed=seed)
    minimum = LowerBound(graph).minimum_bytes()
    assert best_cost(graph, minimum - 1) == np.inf
    assert LowerBound(graph).cost(minimum - 1) == np.inf


def test_the_bound_counts_what_does_not_fit() -> None:
    graph = written_step(
        ((), (0,), 7), ((0,), (1,), 1), ((1,), (2,), 0), ((0, 2), (3,), 0), nbytes=[4, 4, 1, 1]
    )
    assert [best_cost(graph, budget) for budget in (8, 9)] == [7, 0]
    assert LowerBound(graph).cost(8) == pytest.approx(7, rel=1e-6)  # one byte does not fit, so its maker runs
    assert LowerBound(graph).cost(9) == 0


class _AtEveryMoment(Recomputation):
    """Leaves no moment out."""

    def _most(self, moment: Moment, room_bytes: int, *, is_whole: bool = False) -> float:  # noqa: ARG002 (as there)
        return np.inf


@pytest.mark.parametrize("whole", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_moments_that_are_left_out_would_not_raise_the_bound(seed: int, whole: int) -> None:
    chance = random.Random(seed)
    values = range(12)
    nbytes = {value: chance.choice([0, 1, 2, 4]) for value in values}
    makers = {}
    for value in values:
        reads = frozenset(chance.sample(range(value), min(value, chance.randrange(3))))
        makers[value] = Maker(reads=reads, cost=chance.choice([0, 1, 3, 8]))
    moments = [
        Moment(
            there=frozenset(chance.sample(values, 2)),
            wanted=frozenset(chance.sample(values, chance.randrange(1, 9))),
            held_bytes=chance.randrange(6),
        )
        for _ in range(8)
    ]
    found, expected = (cls(makers, nbytes) for cls in (Recomputation, _AtEveryMoment))
    for room_bytes in (4, 6, 8, 12, 16):
        assert found.highest(moments, room_bytes, whole) == expected.highest(moments, room_bytes, whole)
