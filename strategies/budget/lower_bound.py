"""What no schedule of a step's operators can do better: fewest FLOPs run again, and smallest peak.

Take an operator b of backward. When it runs for the first time, its operands and results are there. Each
storage of forward that b or an operator after it reads is there too, or is made again later, by an operator
whose own operands are there or made again. This linear programme has a least cost, which bounds any schedule
that keeps the budget, whatever it recomputes, and how often. Moving values to the host is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.budget.step_graph import StepGraph, StepOperator
from strategies.estimate.scipy_modules import scipy

_TRIED = 4
_MARGIN = 1e-7
"""Share by which a bound is lowered, because the solver computes with floating point numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """A forward operator and those that write to what it makes.

    Fields:
        makes, reads: storages of forward.
        cost: cost of running it again.
    """

    makes: tuple[int, ...]
    reads: frozenset[int]
    cost: float


class LowerBound:
    """Bounds for one step.

    Args:
        graph: the step.
        cost: cost of running an operator again.
    """

    def __init__(
        self, graph: StepGraph, cost: Callable[[StepOperator], float] = lambda operator: operator.flops
    ) -> None:
        self._graph = graph
        self._makers = _makers(graph, cost)
        self._maker = {storage: index for index, each in enumerate(self._makers) for storage in each.makes}
        self._backward = [each for each in graph.operators if not each.is_forward]
        self._made = {storage for each in graph.operators for storage in each.makes}
        self._after = self._reads_after()
        self._marks = self._chosen()

    def minimum_bytes(self) -> int:
        """Return a peak that every schedule reaches: operands and results of one operator."""
        return self._graph.fixed_bytes + max(map(self._own_bytes, self._graph.operators), default=0)

    def cost(self, budget_bytes: int) -> float:
        """Return the least cost of what runs again within a budget; infinite where no schedule keeps it."""
        if self.minimum_bytes() > budget_bytes:
            return np.inf
        return float(max((self._cost_at(mark, budget_bytes) for mark in self._marks), default=0.0))

    def _own_bytes(self, operator: StepOperator) -> int:
        storages = (operator.reads & self._made) | operator.makes.keys()
        return sum(self._graph.nbytes[storage] for storage in storages)

    def _reads_after(self) -> list[frozenset[int]]:
        """Return the storages of forward that each backward operator, and those that follow from it, read."""
        users: dict[int, list[int]] = {}
        for index, operator in enumerate(self._backward):
            for storage in operator.reads:
                users.setdefault(storage, []).append(index)
        return [self._following(index, users) for index in self._candidates()]

    def _candidates(self) -> range:
        """Return the numbers of early backward operators: before most of backward has run."""
        calls = max(len(self._graph.calls), 1)
        return range(min(len(self._backward), len(self._backward) // calls * 2 + 16))

    def _following(self, start: int, users: dict[int, list[int]]) -> frozenset[int]:
        found, todo, read = {start}, [start], set[int]()
        while todo:
            operator = self._backward[todo.pop()]
            read |= operator.reads & self._maker.keys()
            fresh = {user for storage in operator.makes for user in users.get(storage, [])} - found
            found |= fresh
            todo += fresh
        return frozenset(read)

    def _chosen(self) -> list[int]:
        """Return the candidates that leave the least room for what is read later."""
        nbytes = self._graph.nbytes

        def pressure(index: int) -> int:
            return self._own_bytes(self._backward[index]) + sum(nbytes[each] for each in self._after[index])

        return sorted(self._candidates(), key=pressure, reverse=True)[:_TRIED]

    def _cost_at(self, mark: int, budget_bytes: int) -> float:
        operator = self._backward[mark]
        must = operator.reads & self._maker.keys()
        others = [s for s in (operator.reads & self._made) | operator.makes.keys() if s not in must]
        room = budget_bytes - self._graph.fixed_bytes - sum(self._graph.nbytes[each] for each in others)
        return self._least(self._after[mark] | must, must, room)

    def _least(self, wanted: frozenset[int], must: frozenset[int], room: int) -> float:
        """Return the least cost of having `wanted`, of which `must` is there, in `room` bytes."""
        storages, makers = self._relevant(wanted)
        column = {storage: index for index, storage in enumerate(storages)}
        run = {maker: len(storages) + index for index, maker in enumerate(makers)}
        rows: list[tuple[tuple[int, float], ...]] = []
        least: list[float] = []
        for storage in wanted - must:
            rows.append(((column[storage], 1.0), (run[self._maker[storage]], 1.0)))
            least.append(1.0)
        for maker in makers:
            for storage in self._makers[maker].reads:
                rows.append(((column[storage], 1.0), (run[self._maker[storage]], 1.0), (run[maker], -1.0)))
                least.append(0.0)
        size = len(storages) + len(makers)
        if not size:
            return 0.0 if room >= 0 else np.inf
        costs = np.zeros(size)
        costs[len(storages) :] = [self._makers[maker].cost for maker in makers]
        unit_bytes, unit_cost = max(room, 1), max(costs.max(initial=0.0), 1e-30)
        rows.append(tuple((column[s], -self._graph.nbytes[s] / unit_bytes) for s in storages))
        least.append(-room / unit_bytes)
        bounds = np.tile([0.0, 1.0], (size, 1))
        for storage in must:
            bounds[column[storage], 0] = 1.0
        found = scipy("optimize").linprog(
            costs / unit_cost, A_ub=-_matrix(rows, size), b_ub=-np.array(least), bounds=bounds, method="highs"
        )
        if found.status == _INFEASIBLE:
            return np.inf
        return float(max(0.0, found.fun or 0.0) * unit_cost * (1 - _MARGIN))

    def _relevant(self, wanted: frozenset[int]) -> tuple[list[int], list[int]]:
        """Return the storages that `wanted` follows from, and their makers."""
        found, todo = set(wanted), list(wanted)
        while todo:
            fresh = self._makers[self._maker[todo.pop()]].reads - found
            found |= fresh
            todo += fresh
        return sorted(found), sorted({self._maker[storage] for storage in found})


_INFEASIBLE = 2


def _matrix(rows: Sequence[Sequence[tuple[int, float]]], size: int) -> Any:
    starts = np.cumsum([0, *map(len, rows)])
    columns = np.array([column for row in rows for column, _ in row])
    values = np.array([value for row in rows for _, value in row])
    return scipy("sparse").csr_array((values, columns, starts), shape=(len(rows), size))


def _makers(graph: StepGraph, cost: Callable[[StepOperator], float]) -> list[_Maker]:
    """Return the forward operators that make storages, each with those that write to them."""
    groups: list[list[StepOperator]] = []
    home: dict[int, int] = {}
    for operator in graph.operators:
        if not operator.is_forward:
            continue
        written = next((home[storage] for storage in operator.writes if storage in home), None)
        if written is None and not operator.makes:
            continue
        if written is None:
            written = len(groups)
            groups.append([])
        groups[written].append(operator)
        home |= dict.fromkeys(operator.makes, written)
    return [
        _Maker(
            makes=tuple(makes := [storage for each in group for storage in each.makes]),
            reads=frozenset(s for each in group for s in each.reads if s in home and s not in makes),
            cost=sum(map(cost, group)),
        )
        for group in groups
    ]
