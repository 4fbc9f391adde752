"""The bound, against the best of all schedules of small steps."""

from __future__ import annotations

import heapq
import random
from itertools import count

import numpy as np
import pytest

from strategies.budget.lower_bound import LowerBound
from strategies.budget.step_graph import StepGraph
from tests.strategies.budget.small_steps import written_step


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


def best_cost(graph: StepGraph, budget_bytes: int) -> float:
    """Return the fewest FLOPs run again by any schedule: storages are made and dropped at will."""
    operators, nbytes = graph.operators, graph.nbytes
    done = sum(1 << index for index, each in enumerate(operators) if not each.is_forward)
    reads = [sum(1 << s for s in each.reads) for each in operators]
    makes = [sum(1 << s for s in each.makes) for each in operators]
    size = {0: 0}

    def bytes_of(mask: int) -> int:
        if mask not in size:
            low = mask & -mask
            size[mask] = bytes_of(mask ^ low) + nbytes[low.bit_length() - 1]
        return size[mask]

    order = count()
    queue = [(0, next(order), 0, 0)]
    seen: dict[tuple[int, int], int] = {(0, 0): 0}
    while queue:
        cost, _, live, ran = heapq.heappop(queue)
        if ran & done == done:
            return cost
        if seen[live, ran] < cost:
            continue
        nexts = [(cost, live & ~(1 << storage), ran) for storage in nbytes if live >> storage & 1]
        for index, operator in enumerate(operators):
            is_again = bool(ran >> index & 1)
            if live & reads[index] == reads[index] and bytes_of(live | makes[index]) <= budget_bytes:
                again = operator.flops if is_again else 0
                nexts.append((cost + again, live | makes[index], ran | 1 << index))
        for following in nexts:
            if following[0] < seen.get(following[1:], 1 << 30):
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
    assert LowerBound(graph).cost(8) == pytest.approx(7 / 4, rel=1e-6)  # one of four bytes does not fit
    assert LowerBound(graph).cost(9) == 0
