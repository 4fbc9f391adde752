"""What no schedule of a step's operators can do better: fewest FLOPs run again, and smallest peak.

Take an operator b of backward. All that it follows from has run before it. When it runs for the first time,
its operands and results are there. So is each storage that b's ancestors have made and that an operator after
b reads, or that outlives the step, unless operators make it again whose own operands are there or made again.
The least cost of this linear programme bounds any schedule that keeps the budget, whatever it makes again and
how often. Moving values to the host is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.budget.step_graph import StepGraph, StepOperator
from strategies.estimate.scipy_modules import scipy

_TRIED = 6
_CONSIDERED = 32
_MARGIN = 1e-7
"""Share by which a bound is lowered, because the solver computes with floating point numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """An operator and those that write to what it makes.

    Fields:
        operators: their numbers.
        makes, reads: storages of the step.
        cost: cost of running them again.
    """

    operators: tuple[int, ...]
    makes: tuple[int, ...]
    reads: frozenset[int]
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """An operator of backward, and what is there or made again when it has run.

    Fields:
        own: its operands and results.
        operands: those of them that were made before.
        wanted: what its ancestors have made and is needed after it, its operands included.
    """

    own: frozenset[int]
    operands: frozenset[int]
    wanted: frozenset[int]


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
        self._marks = self._chosen()

    def minimum_bytes(self) -> int:
        """Return a peak that every schedule reaches: operands and results of one operator."""
        return self._graph.fixed_bytes + max(
            (self._bytes_of(self._own(each)) for each in self._graph.operators), default=0
        )

    def cost(self, budget_bytes: int) -> float:
        """Return the least cost of what runs again within a budget; infinite where no schedule keeps it."""
        if self.minimum_bytes() > budget_bytes:
            return np.inf
        return float(max((self._cost_at(mark, budget_bytes) for mark in self._marks), default=0.0))

    def _own(self, operator: StepOperator) -> frozenset[int]:
        return frozenset(operator.reads & self._maker.keys()) | operator.makes.keys()

    def _bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self._graph.nbytes[storage] for storage in storages)

    def _chosen(self) -> list[_Mark]:
        """Return the early operators of backward after which the most bytes are needed."""
        operators = self._graph.operators
        backward = [index for index, each in enumerate(operators) if not each.is_forward]
        early = backward[: len(backward) // max(len(self._graph.calls), 1) * 2 + 16]
        early.sort(key=lambda index: self._bytes_of(self._own(operators[index])), reverse=True)
        before, after = _ancestors(operators), _later_reads(operators)
        made_by = [sum(1 << operator for operator in maker.operators) for maker in self._makers]
        outliving = sum(1 << storage for storage in self._graph.gradients)
        marks = []
        for index in early[:_CONSIDERED]:
            ran = before[index]
            own = self._own(operators[index])
            needed = after[index] | outliving
            wanted = frozenset(
                storage
                for maker, bits in zip(self._makers, made_by, strict=True)
                if ran & bits == bits and index not in maker.operators
                for storage in maker.makes
                if needed >> storage & 1
            )
            marks.append(_Mark(own=own, operands=own & wanted, wanted=wanted))
        return sorted(marks, key=lambda mark: self._bytes_of(mark.own | mark.wanted), reverse=True)[:_TRIED]

    def _cost_at(self, mark: _Mark, budget_bytes: int) -> float:
        room = budget_bytes - self._graph.fixed_bytes - self._bytes_of(mark.own - mark.operands)
        return self._least(mark.wanted, mark.operands, room)

    def _least(self, wanted: frozenset[int], must: frozenset[int], room: int) -> float:
        """Return the least cost of having `wanted`, of which `must` is there, in `room` bytes."""
        if not wanted:
            return 0.0
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
    """Return the operators that make storages, each with those that write to them."""
    groups: list[list[int]] = []
    home: dict[int, int] = {}
    for index, operator in enumerate(graph.operators):
        written = next((home[storage] for storage in operator.writes if storage in home), None)
        if written is None and not operator.makes:
            continue
        if written is None:
            written = len(groups)
            groups.append([])
        groups[written].append(index)
        home |= dict.fromkeys(operator.makes, written)
    return [_maker_of(group, graph.operators, home, cost) for group in groups]


def _maker_of(
    group: Sequence[int],
    operators: Sequence[StepOperator],
    home: Mapping[int, int],
    cost: Callable[[StepOperator], float],
) -> _Maker:
    members = [operators[index] for index in group]
    makes = [storage for each in members for storage in each.makes]
    reads = frozenset(storage for each in members for storage in each.reads)
    return _Maker(
        operators=tuple(group),
        makes=tuple(makes),
        reads=frozenset(storage for storage in reads if storage in home).difference(makes),
        cost=sum(map(cost, members)),
    )


def _ancestors(operators: Sequence[StepOperator]) -> list[int]:
    """Return the operators that each one follows from, and itself, as bits."""
    found: list[int] = []
    touched: dict[int, int] = {}  # operators that have made a storage or written to it
    for index, operator in enumerate(operators):
        bits = 1 << index
        for storage in operator.reads:
            bits |= touched.get(storage, 0)
        found.append(bits)
        for storage in (*operator.makes, *operator.writes):
            touched[storage] = touched.get(storage, 0) | bits
    return found


def _later_reads(operators: Sequence[StepOperator]) -> list[int]:
    """Return the storages that each operator, and all that follow from it, read, as bits."""
    found = [0] * len(operators)
    read_by: dict[int, int] = {}  # what the readers of a storage, and all that follow, read
    for index in range(len(operators) - 1, -1, -1):
        operator = operators[index]
        bits = sum(1 << storage for storage in operator.reads)
        for storage in operator.makes:
            bits |= read_by.get(storage, 0)
        found[index] = bits
        for storage in operator.reads:
            read_by[storage] = read_by.get(storage, 0) | bits
    return found
