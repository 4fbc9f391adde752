"""Lower bounds of any schedule of a step's operators: fewest FLOPs run again, and smallest peak.

A *schedule* runs each operator of the step at least once, in any order and as often as it likes. An operator
runs where the storages of its operands are there, whole, with the content that it reads; its results are new
storages. Storages are dropped at will, and moved to the host and back where it has room; operands and results
of what runs are on the device. Cutting operators in chunks is no part of it. What an operator writes in place
may be wanted by nobody, or half of it, and the graph does not say by whom: so an operator *follows* only from
those that make the storages that it reads, and from what they follow from, and is never charged for writes.
That is less than a schedule must do.

Take one operator b, and in any schedule the moment at which it runs for the first time. Then:

1. Its operands and results are there, and so is what is never freed.
2. All that it follows from has run, for nothing exists that its maker has not made.
3. What follows from b, and is not b, has not run. All of it runs later, and has its operands then.
4. So a storage whose maker b follows from, and that an operator of 3 reads or the end of the step finds, is
   there now, maybe on the host (`there` = 1), or its maker runs after b (`again` = 1): `there` + `again` >=
   1.
5. A maker that runs after b has its own operands then. Each was made before b, by 2, so it is there now or is
   made again as well: `there` + `again` >= `again` of its reader.
6. Each maker that runs after b ran before it, by 2, so its cost is paid again: the sum of cost times `again`.
7. What is there now, with the results of b, is within the budget and the room on the host together: the sum
   of bytes times `there`.

A schedule gives each unknown the value 0 or 1. The least cost with values between is no more: the bound is
the largest over several b. In small steps the least cost with whole values is sought at that b, too, and
what branch and bound has proven of it counts. What exists several times, or was made again before b, is
counted once.

Source: HiGHS (Huangfu and Hall, 2018) solves both programmes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.estimate.scipy_modules import scipy
from strategies.step.needed import needed
from strategies.step.step_graph import StepGraph, StepOperator

_TRIED = 6
_CONSIDERED = 32
_NODES = 100
"""Most nodes of branch and bound: a number of seconds would give another bound each time."""

_MOST_WHOLE = 1200
"""Most unknowns of a programme with whole values: in larger ones they change nothing that one would see."""

_MARGIN = 1e-7
"""Share by which a bound is lowered, because the solver computes with floating point numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    """An operator that makes storages.

    Fields:
        operator: its number.
        reads: storages of its operands that the step has made before.
        cost: cost of running it again.
    """

    operator: int
    reads: frozenset[int]
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """An operator b, and what is there or made again when it has run.

    Fields:
        own: its operands and results.
        wanted: what its ancestors have made and is needed after it, its operands included.
    """

    own: frozenset[int]
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
        self._reads = _reads_of_step(graph.operators)
        self._maker = {
            storage: _Maker(operator=index, reads=self._reads[index], cost=cost(operator))
            for index, operator in enumerate(graph.operators)
            for storage in operator.makes
        }
        self._marks = self._chosen()

    def minimum_bytes(self) -> int:
        """Return a peak that every schedule reaches: operands and results of one operator."""
        return self._graph.fixed_bytes + max(
            (self._bytes_of(self._own(index)) for index in range(len(self._graph.operators))), default=0
        )

    def cost(self, budget_bytes: int, host_bytes: int = 0) -> float:
        """Return the least cost of what runs again within a budget; infinite where no schedule keeps it.

        Args:
            budget_bytes: most bytes on the device.
            host_bytes: most bytes on the host.
        """
        if self.minimum_bytes() > budget_bytes:
            return np.inf
        room = budget_bytes + host_bytes
        costs = [self._cost_at(mark, room) for mark in self._marks]
        highest = max(costs, default=0.0)
        if not 0 < highest < np.inf:
            return highest
        return max(highest, self._cost_at(self._marks[costs.index(highest)], room, is_whole=True))

    def _own(self, index: int) -> frozenset[int]:
        return self._reads[index] | self._graph.operators[index].makes.keys()

    def _bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self._graph.nbytes[storage] for storage in storages)

    def _chosen(self) -> list[_Mark]:
        """Return the early operators of backward after which the most bytes are needed."""
        operators = self._graph.operators
        backward = [index for index, each in enumerate(operators) if not each.is_forward]
        early = backward[: len(backward) // max(len(self._graph.calls), 1) * 2 + 16]
        early.sort(key=lambda index: self._bytes_of(self._own(index)), reverse=True)
        before, after = _ancestors(operators, self._reads), _later_reads(operators)
        outliving = sum(1 << storage for storage in self._graph.gradients)
        marks = []
        for index in early[:_CONSIDERED]:
            ran, needed = before[index] & ~(1 << index), after[index] | outliving
            wanted = frozenset(
                storage
                for storage, maker in self._maker.items()
                if ran >> maker.operator & 1 and needed >> storage & 1
            )
            marks.append(_Mark(own=self._own(index), wanted=wanted))
        return sorted(marks, key=lambda mark: self._bytes_of(mark.own | mark.wanted), reverse=True)[:_TRIED]

    def _cost_at(self, mark: _Mark, budget_bytes: int, *, is_whole: bool = False) -> float:
        """Return the least cost of having what is wanted at a mark, which is there itself.

        Args:
            mark: the mark.
            budget_bytes: most bytes there.
            is_whole: whether a storage is there or not, and a maker runs or not; else both may be in part. 0
                where the step is too large for that.
        """
        storages = self._relevant(mark.wanted)
        if not storages:
            return 0.0
        makers = {self._maker[storage].operator: self._maker[storage] for storage in storages}
        column = {storage: index for index, storage in enumerate(storages)}
        again = {maker: len(storages) + index for index, maker in enumerate(makers)}
        rows: list[tuple[tuple[int, float], ...]] = []
        least: list[float] = []
        for storage in mark.wanted - mark.own:
            rows.append(((column[storage], 1.0), (again[self._maker[storage].operator], 1.0)))
            least.append(1.0)
        for number, maker in makers.items():
            for read in maker.reads:
                run = again[self._maker[read].operator]
                rows.append(((column[read], 1.0), (run, 1.0), (again[number], -1.0)))
                least.append(0.0)
        size = len(storages) + len(makers)
        if is_whole and size > _MOST_WHOLE:
            return 0.0
        costs = np.zeros(size)
        costs[len(storages) :] = [maker.cost for maker in makers.values()]
        room = budget_bytes - self._graph.fixed_bytes - self._bytes_of(mark.own.difference(storages))
        unit_bytes, unit_cost = max(room, 1), max(costs.max(initial=0.0), 1e-30)
        rows.append(tuple((column[s], -self._graph.nbytes[s] / unit_bytes) for s in storages))
        least.append(-(room + 0.5) / unit_bytes)  # bytes are whole: rounding must not forbid what just fits
        at_least = np.zeros(size)
        at_least[[column[storage] for storage in mark.own.intersection(storages)]] = 1.0
        optimize = scipy("optimize")
        found = optimize.milp(
            costs / unit_cost,
            integrality=np.full(size, int(is_whole)),
            bounds=optimize.Bounds(at_least, 1.0),
            constraints=optimize.LinearConstraint(_matrix(rows, size), lb=np.array(least)),
            options={"node_limit": _NODES},
        )
        if found.status == _INFEASIBLE:
            return np.inf
        proven = found.mip_dual_bound if is_whole else found.fun
        return float(max(0.0, proven or 0.0) * unit_cost * (1 - _MARGIN))

    def _relevant(self, wanted: frozenset[int]) -> list[int]:
        """Return `wanted` and the storages that it follows from."""
        return sorted(needed(wanted, lambda storage: self._maker[storage].reads))


_INFEASIBLE = 2


def _matrix(rows: Sequence[Sequence[tuple[int, float]]], size: int) -> Any:
    starts = np.cumsum([0, *map(len, rows)])
    columns = np.array([column for row in rows for column, _ in row])
    values = np.array([value for row in rows for _, value in row])
    return scipy("sparse").csr_array((values, columns, starts), shape=(len(rows), size))


def _reads_of_step(operators: Sequence[StepOperator]) -> list[frozenset[int]]:
    """Return what each operator reads of what the step has made before."""
    made: set[int] = set()
    found = []
    for operator in operators:
        found.append(operator.reads & made)
        made |= operator.makes.keys()
    return found


def _ancestors(operators: Sequence[StepOperator], reads: Sequence[frozenset[int]]) -> list[int]:
    """Return the operators that each one follows from, and itself, as bits."""
    found: list[int] = []
    made: dict[int, int] = {}  # a storage's maker, and what that follows from
    for index, operator in enumerate(operators):
        bits = 1 << index
        for storage in reads[index]:
            bits |= made[storage]
        found.append(bits)
        made |= dict.fromkeys(operator.makes, bits)
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
