"""Making the plan of a step that can run in chunks: each way to run it is planned, and the cheapest wins.

A step in chunks is another step: its loops have operators, storages and moments of their own, which were
captured like all others. So blocks are planned in it with the decisions that there are, its peak is exact,
and what loops compute again in backward is work of the step itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strategies.budget.plan import Plan, readable
from strategies.budget.planning.cost import Cost, Objective
from strategies.budget.planning.planner import BudgetBelowMinimum, Planner
from strategies.budget.planning.recomputation import LeastFlops
from strategies.budget.planning.simulation import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run a step.

    Fields:
        planner: plans its blocks.
        chunk: the plan of its chunks, as JSON values; `None` of the step without chunks.
    """

    planner: Planner
    chunk: Mapping[str, Any] | None


class ChunkedPlanner:
    """Plans for a step that can be run in several ways, whatever the budget.

    Args:
        ways: the step without chunks, then in chunks of several plans.
        objective: what is least (see `Cost`).

    Attributes:
        minimum_feasible_bytes: smallest peak that a plan reaches, in any way.
        stages: stages of a pipeline that the step is of; none of a whole model.
    """

    def __init__(self, ways: Sequence[Way], objective: Objective = "flops") -> None:
        self._ways = ways
        self._objective = objective
        self._plain = ways[0].planner
        self._cost = Cost.of(objective, self._plain.step_flops, self._plain.step_s)
        self.stages = self._plain.stages
        self.plain_peak_bytes = self._plain.plain_peak_bytes
        self.chunkings = sum(way.chunk is not None for way in ways)
        self.minimum_feasible_bytes = min(way.planner.minimum_feasible_bytes for way in ways)

    def plan(self, budget_bytes: int) -> Plan:
        """Return the cheapest plan for a budget, without chunks where they gain nothing or none are needed.

        What it costs, and the bounds, are of all ways: they count from the step without chunks.

        Raises:
            BudgetBelowMinimum: no plan that was found keeps it.
        """
        ways = self._ways[:1] if budget_bytes >= self.plain_peak_bytes else self._ways
        found = [plan for way in ways if (plan := self._planned(way, budget_bytes)) is not None]
        if not found:
            raise BudgetBelowMinimum(
                budget_bytes, self.minimum_feasible_bytes, self._proven_bytes(), self._limits()
            )
        cheapest = min(found, key=self._cost_of_plan)  # the first of equal ones
        return replace(
            cheapest,
            plain_peak_bytes=self.plain_peak_bytes,
            minimum_feasible_bytes=self.minimum_feasible_bytes,
            proven_minimum_bytes=self._proven_bytes(),
            step_flops=self._plain.step_flops,
            **self.least_flops(budget_bytes).in_plan(),
            chunkings=self.chunkings,
            chunk=cheapest.chunk and {"why": self._why(found[0]), **cheapest.chunk},
        )

    def _planned(self, way: Way, budget_bytes: int) -> Plan | None:
        """Return the plan of one way, `None` where none fits; work counts from the step without chunks."""
        try:
            plan = way.planner.plan(budget_bytes)
        except BudgetBelowMinimum:
            return None
        flops, seconds = self._work_of_loops(way)
        return replace(
            plan,
            extra_flops=plan.extra_flops + flops,
            extra_s=plan.extra_s + seconds,
            chunk=way.chunk and {"extra_flops": flops, **way.chunk},
        )

    def _work_of_loops(self, way: Way) -> tuple[int, float]:
        """Return the work of loops beyond the plain step's; loops leave out rows that nobody reads."""
        return (
            max(0, way.planner.step_flops - self._plain.step_flops),
            max(0.0, way.planner.step_s - self._plain.step_s),
        )

    def _cost_of_plan(self, plan: Plan) -> float:
        return self._cost(Work(plan.extra_flops, plan.extra_s))

    def _limits(self) -> str:
        """Return what no plan makes smaller, of the planner without chunks that reaches the smallest peak."""
        planners = [way.planner for way in self._ways if way.chunk is None]
        return min(planners, key=lambda each: each.minimum_feasible_bytes).limits()

    def _proven_bytes(self) -> int:
        return min(way.planner.bound.minimum_bytes() for way in self._ways)

    def least_flops(self, budget_bytes: int) -> LeastFlops:
        """Return the least of the bounds of all ways; endless where none has a schedule, 0 of seconds."""
        if self._objective == "time":
            return LeastFlops(0.0, 0.0)
        bounds = [
            [least + self._work_of_loops(way)[0] for least in way.planner.least_flops(budget_bytes)]
            for way in self._ways
        ]
        return LeastFlops(*map(min, zip(*bounds, strict=True)))

    def _why(self, first: Plan) -> str:
        """Return why there are chunks; `first` is the first plan that keeps the budget."""
        if first.chunk is not None:
            return f"without chunks the smallest peak is {readable(self._plain.minimum_feasible_bytes)}"
        if self._objective == "time":
            return f"without chunks the budget costs {first.extra_s * 1e3:.3g} ms"
        return f"without chunks the budget costs {first.percent(first.extra_flops):.2f} % extra FLOPs"
