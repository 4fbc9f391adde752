"""The bound of schedules that leave backward to autograd, against the best of all of them in small steps."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn

from strategies.budget.planning.autograd_bound import AutogradBound, Backward, _prominences
from strategies.budget.planning.block_program import planned_call
from strategies.budget.planning.planner import Planner
from strategies.step.step_graph import BlockCall, Redemption, StepGraph, StepOperator
from strategies.step.step_recorder import OperatorWork
from tests.strategies.budget.planning.test_enumeration import Blocks, Residual, linear
from tests.strategies.step.test_plan_capture import captured

SHARES = (0.05, 0.3, 0.6)
"""Budgets between what backward holds at least, and what it holds where everything is kept."""


def bound_of(graph: StepGraph) -> AutogradBound:
    return AutogradBound(Backward.captured(graph, [planned_call(graph, call) for call in graph.calls]))


def written(values: int, *, seed: int, writes: bool = False, outside: bool = False) -> StepGraph:
    """Return a forward in two blocks, each operator of which reads older values, and a backward.

    The nodes of backward ask for one or two values each, and hold them for a while. Gradients come and go.
    What both blocks ask for, the captured step holds. With a value from `outside` some operators read that,
    and a node may ask for it.
    """
    chance, which, beyond = random.Random(seed), random.Random(seed), random.Random(seed)
    operators: list[StepOperator] = []
    calls = [BlockCall(fqn="a", start=0, end=values), BlockCall(fqn="b", start=values, end=2 * values)]
    deaths = dict.fromkeys(range(values), 0)
    in_place = {chance.randrange(1, values)} if writes else set[int]()
    for value in range(values):
        reads = frozenset(chance.sample(range(value), min(value, chance.choice([1, 1, 2]))))
        if outside and beyond.random() < 0.4:
            reads |= {values}
        call = int(value >= values // 2)
        deaths |= dict.fromkeys((*reads, value), 2 * value + 1)
        for part in range(1 + (value in in_place)):
            calls[call].operators.append(len(operators))
            operators.append(
                StepOperator(
                    work=OperatorWork(phase="", name="aten.row.default", flops=chance.choice([0, 1, 2, 5])),
                    call=call,
                    ordinal=len(calls[call].operators) - 1,
                    is_forward=True,
                    start=2 * value + part,
                    end=2 * value + part + 1,
                    reads=frozenset({value}) if part else reads,
                    writes=frozenset({value} if part else ()),
                    makes={} if part else {value: 0},
                    seconds=0.0,
                    private_bytes=0,
                    random_states=0,
                    is_repeatable=True,
                    node="",
                )
            )
    moment = 2 * values
    for value in reversed(range(values)):
        for asked in {value, chance.randrange(values)} if chance.random() < 0.8 else set[int]():
            until = moment + chance.choice([1, 1, 2, 3])
            maker = calls[int(asked >= values // 2)]
            asks = which.choice(calls)
            (asks.redemptions if asks is maker else asks.shared).append(
                Redemption(
                    storage=asked, moment=moment, until=until, node_until=until, released=until, node=""
                )
            )
            moment += chance.choice([0, 1])
        moment += chance.choice([1, 2])
    if values in deaths and beyond.random() < 0.4:
        calls[1].redemptions.append(replace(calls[1].redemptions[0], storage=values))
    held = np.array([chance.choice([0, 0, 1, 3]) for _ in range(moment + 5)], dtype=np.int64)
    nbytes = {value: chance.choice([1, 2, 3, 4]) for value in range(values)} | {values: 3}
    unshared = {each.storage: deaths[each.storage] for call in calls for each in call.shared}
    for each in (each for call in calls for each in call.shared):
        if each.until > deaths[each.storage]:
            held[deaths[each.storage] + 1 : each.until + 1] += nbytes[each.storage]
            deaths[each.storage] = each.until
    return StepGraph(
        operators=operators,
        calls=calls,
        nbytes=nbytes,
        deaths=deaths,
        held_bytes=held,
        unshared=unshared,
        gradients=frozenset(),
        fixed_bytes=0,
        device="cpu",
    )


class Schedules:
    """All schedules of a step whose backward is as it is, from any values that forward has left.

    What backward holds is looked up in the captured step, moment by moment; operators run one by one.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.forward = [graph.operators[index] for call in graph.calls for index in call.operators]
        self.start = max(call.end for call in graph.calls)
        every = [each for call in graph.calls for each in (*call.redemptions, *call.shared)]
        until = max((each.until for each in every), default=0)
        read = {*(s for each in self.forward for s in each.reads), *(each.storage for each in every)}
        made = {s for each in self.forward for s in each.makes}
        outside = {s for s in read - made if graph.deaths[s] < until}
        self.bit = {s: 1 << place for place, s in enumerate(sorted(made | outside))}
        self.asked = [each for each in every if each.storage in self.bit]
        self.last = max((each.moment for each in self.asked), default=self.start)
        moments = range(self.last + 2)
        own = {
            s: graph.unshared.get(s, graph.deaths[s]) for s in self.bit
        }  # as long as it lives without a request
        self.natural = [self._mask(s for s in self.bit if at <= own[s]) for at in moments]
        self.held = [
            held - sum(graph.nbytes[s] for s, last in own.items() if last < at <= graph.deaths[s])
            for at, held in enumerate(map(int, graph.held_bytes))
        ]
        self.forced = [
            self._mask(each.storage for each in self.asked if each.moment < at <= each.until)
            for at in moments
        ]

    def _mask(self, storages: Iterator[int]) -> int:
        return sum({self.bit[storage] for storage in storages})

    def nbytes(self, moment: int, live: int) -> int:
        """Return the bytes at a moment with the values of a mask."""
        there = (live | self.forced[moment]) & ~self.natural[moment]
        return self.held[moment] + sum(
            self.graph.nbytes[storage] for storage, bit in self.bit.items() if there & bit
        )

    def runs(self, moment: int, live: int) -> Iterator[tuple[int, int]]:
        """Yield the cost of each operator that can run, with the values after it; writers run with makers."""
        have = live | self.forced[moment] | self.natural[moment]
        for each in self.forward:
            makes = self._mask(iter(each.makes))
            together = [each, *(w for w in self.forward if w.writes & each.makes.keys())]
            reads = {s for w in together for s in w.reads if s in self.bit and s not in each.makes}
            if makes and have & self._mask(iter(reads)) == self._mask(iter(reads)):
                yield sum(w.flops for w in together), live | makes

    def after(self, moment: int, live: int) -> bool:
        """Say whether what is asked for at a moment is there."""
        have = live | self.forced[moment] | self.natural[moment]
        return all(have & self.bit[each.storage] for each in self.asked if each.moment == moment)

    def best(self, budget: int) -> float:
        """Return the fewest FLOPs run again; endless where no schedule keeps the budget."""
        held = self.held[self.last + 1 :]
        until = max((each.until for each in self.asked), default=0)
        ends = range(self.last + 1, until + 1)
        outlive = [self._mask(e.storage for e in self.asked if e.moment < at <= e.until) for at in ends]
        sums = [sum(self.graph.nbytes[s] for s, bit in self.bit.items() if mask & bit) for mask in outlive]
        if max([*held, *(self.held[at] + more for at, more in zip(ends, sums, strict=True))]) > budget:
            return np.inf
        order = count()
        first = (self.start, sum(self.bit.values()))
        seen = {first: 0}
        queue = [(0, next(order), *first)]
        while queue:
            cost, _, moment, live = heapq.heappop(queue)
            if moment > self.last:
                return cost
            if seen[moment, live] < cost:
                continue
            nexts = [(0, moment, live & ~bit) for bit in self.bit.values() if live & bit]
            if self.nbytes(moment, live) <= budget:
                nexts += [(flops, moment, made) for flops, made in self.runs(moment, live)]
                nexts += [(0, moment + 1, live)] if self.after(moment, live) else []
            for flops, *state in nexts:
                at, made = state
                is_kept = made & live == made or self.nbytes(at, made) <= budget
                if is_kept and cost + flops < seen.get((at, made), 1 << 60):
                    seen[at, made] = cost + flops
                    heapq.heappush(queue, (cost + flops, next(order), at, made))
        return np.inf


def within(bound: AutogradBound, schedules: Schedules, share: float) -> int:
    """Return a budget between what backward holds at least, and what it holds where everything is kept."""
    everything = sum(schedules.bit.values())
    most = max(schedules.nbytes(moment, everything) for moment in range(schedules.start, schedules.last + 2))
    return int(bound.minimum_bytes + share * (most - bound.minimum_bytes))


def compared(graph: StepGraph) -> Iterator[tuple[float, float]]:
    """Yield the bound and the best of all schedules for budgets of a step."""
    bound, schedules = bound_of(graph), Schedules(graph)
    for budget in (bound.minimum_bytes - 1, *(within(bound, schedules, share) for share in SHARES)):
        yield max(bound.cost(budget), bound.jointly(budget)), schedules.best(budget)


@pytest.mark.parametrize(
    ("values", "how"),
    [(4, {}), (6, {}), (4, {"writes": True}), (6, {"writes": True}), (6, {"outside": True})],
    ids=["4-", "6-", "4-writes", "6-writes", "6-outside"],
)
def test_no_schedule_of_a_written_step_beats_the_bound(values: int, how: dict[str, bool]) -> None:
    found = [each for seed in range(12) for each in compared(written(values, seed=seed, **how))]
    assert all(least <= best for least, best in found)
    assert all(least == best == np.inf for least, best in found[:: 1 + len(SHARES)])  # too few bytes
    positive = [(least, best) for least, best in found if 0 < best < np.inf]
    equal = [least for least, best in positive if least == pytest.approx(best)]
    assert len(positive) > 8
    assert len(equal) > 0.4 * len(positive)


def test_what_runs_again_holds_what_it_reads_from_outside() -> None:
    """Raises the bound of some steps: without its bytes schedules would seem to be possible that are not."""
    raised = 0
    for seed in range(12):
        graph = written(6, seed=seed, outside=True)
        bound, free = bound_of(graph), bound_of(replace(graph, nbytes={**graph.nbytes, 6: 0}))
        budget = bound.minimum_bytes + 4
        raised += free.cost(budget) < bound.cost(budget) <= Schedules(graph).best(budget)
    assert raised > 1


def test_moments_together_prove_more_than_each_alone_and_stop_at_enough() -> None:
    found: list[tuple[float, float, float]] = []
    for seed in range(24):
        graph = written(6, seed=seed)
        bound, schedules = bound_of(graph), Schedules(graph)
        budget = within(bound, schedules, 0.3)
        found.append((bound.cost(budget), bound.jointly(budget), schedules.best(budget)))
        if 0 < found[-1][0] < np.inf:
            assert bound.jointly(budget, enough=0.0) <= found[-1][1]
    assert any(alone < together <= best for alone, together, best in found)
    assert bound.jointly(bound.minimum_bytes - 1) == np.inf


@pytest.mark.parametrize(
    ("heights", "peaks"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param([0, 0], {}, id="nothing there"),
        pytest.param([3], {0: 3}, id="one moment"),
        pytest.param([5, 1, 2], {0: 5, 2: 1}, id="both ends"),
        pytest.param([1, 2, 3], {2: 3}, id="a slope"),
        pytest.param([4, 1, 3, 2, 7], {0: 3, 2: 1, 4: 7}, id="as far as to the higher side"),
        pytest.param([1, 6, 6, 6, 2, 6], {2: 6, 5: 6}, id="equal heights, which are no way to a higher one"),
        pytest.param([2, 5, 5, 3, 5], {1: 5, 4: 5}, id="the earlier of two in the middle"),
    ],
)
def test_peaks_rise_above_the_way_to_a_higher_one(heights: list[int], peaks: dict[int, int]) -> None:
    assert _prominences(heights) == peaks


@pytest.mark.parametrize(("values", "seed", "share"), [(6, 39, 0.3), (7, 17, 0.6), (7, 35, 0.3)])
def test_peaks_of_backward_prove_more_than_moments_that_are_added(
    values: int, seed: int, share: float
) -> None:
    graph = written(values, seed=seed)
    bound, schedules = bound_of(graph), Schedules(graph)
    budget = within(bound, schedules, share)
    without_peaks = max(bound.cost(budget), bound.jointly(budget, near=0.0))
    assert without_peaks < 0.9 * bound.jointly(budget)
    assert bound.jointly(budget) <= schedules.best(budget)


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "a funnel": lambda: [nn.Sequential(linear(a, b), nn.Tanh()) for a, b in ((16, 64), (64, 32), (32, 16))],
    "residual blocks": lambda: [
        Residual(nn.Sequential(linear(16, 48), nn.GELU(), linear(48, 16))) for _ in range(2)
    ],
    "cheap operators": lambda: [
        nn.Sequential(linear(16, 16), nn.Tanh(), nn.Sigmoid(), nn.SiLU()) for _ in range(2)
    ],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_schedule_of_a_captured_step_beats_the_bound(name: str) -> None:
    torch.manual_seed(0)
    graph = captured(Blocks(NETWORKS[name]()), torch.randn(512, 16))
    assert len(Schedules(graph).forward) <= 14
    found = list(compared(graph))
    assert all(least <= best for least, best in found)
    equal = [least for least, best in found if 0 < best < np.inf and least == pytest.approx(best)]
    assert equal or max(best for _, best in found[1:]) == 0
    planner = Planner(graph)
    smallest, plain = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    for share in SHARES:
        plan = planner.plan(int(smallest + share * (plain - smallest)))
        assert plan.lower_bound_extra_flops <= plan.lower_bound_autograd_flops <= plan.extra_flops
