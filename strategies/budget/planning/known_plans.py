"""Plans of a step, each searched for where nobody knows it: equal steps have equal plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from strategies.budget.kept import Answers
from strategies.budget.plan import Plan
from strategies.budget.planning.chunked_planning import ChunkedPlanner, Way
from strategies.budget.planning.cost import Objective
from strategies.budget.planning.planner import BudgetBelowMinimum, Planner
from strategies.budget.planning.scheduled_planner import ScheduledPlanner
from strategies.step.step_graph import StepGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class WayToPlan:
    """One way to run a step, with all that its plans follow from.

    Fields:
        graph, objective, host_bytes, nests, is_taped: as of `Planner`.
        chunk: as of `Way`.
    """

    graph: StepGraph
    objective: Objective
    host_bytes: int
    nests: bool
    is_taped: bool
    chunk: Mapping[str, Any] | None

    def ways(self) -> Iterator[Way]:
        """Yield the way with its planners, which search for options.

        Where blocks are called several times, one decides about all calls of a block at once; without a
        pipeline it leaves the host empty.
        """
        if self.graph.stages:
            yield self._way(ScheduledPlanner, host_bytes=self.host_bytes)
            return
        yield self._way(Planner, host_bytes=self.host_bytes, nests=self.nests)
        if self._has_repeated_calls() and self.is_taped:
            yield self._way(ScheduledPlanner, host_bytes=0)

    def _way(self, kind: type[Planner], *, host_bytes: int, nests: bool = False) -> Way:
        of_step = kind(
            self.graph,
            objective=self.objective,
            host_bytes=host_bytes,
            nests=nests,
            is_taped=self.is_taped,
        )
        return Way(planner=of_step, chunk=self.chunk)

    def _has_repeated_calls(self) -> bool:
        return len({call.fqn for call in self.graph.calls}) < len(self.graph.calls)


class KnownPlans:
    """Plans for a step that can be run in several ways, whatever the budget.

    Args:
        ways: the step without chunks, then in chunks of several plans.
        objective: as of `ChunkedPlanner`.
    """

    def __init__(self, ways: Sequence[WayToPlan], objective: Objective) -> None:
        self._ways = ways
        self._objective = objective
        self._known = Answers(objective, ways)
        self.stages = ways[0].graph.stages
        self.chunkings = len(ways) - 1

    def range_bytes(self) -> tuple[int, int]:
        """Return the peak of the step without a plan, and the smallest that a plan reaches."""
        match self._known.read("range"):
            case [int(plain_bytes), int(least_bytes)]:
                return plain_bytes, least_bytes
        found = self._planner.plain_peak_bytes, self._planner.minimum_feasible_bytes
        self._known.write("range", found)
        return found

    def plan(self, budget_bytes: int, spare_bytes: int = 0) -> Plan:
        """Return the cheapest plan for a budget, which stays below it by `spare_bytes`.

        Raises:
            BudgetBelowMinimum: no plan that was found keeps it.
        """
        name = f"{budget_bytes} {spare_bytes}"
        match self._known.read(name):
            case [int(below_bytes), int(reached_bytes), int(proven_bytes), str(limits)]:
                raise BudgetBelowMinimum(below_bytes, reached_bytes, proven_bytes, limits)
            case dict(held):
                return Plan.from_dict(held)
        try:
            plan = self._planner.plan(budget_bytes - spare_bytes)
        except BudgetBelowMinimum as error:
            self._known.write(name, error.args)
            raise
        least = self._planner.least_flops(budget_bytes).in_plan()
        host_bytes = self._ways[0].host_bytes
        plan = replace(plan, budget_bytes=budget_bytes, host_budget_bytes=host_bytes, spare_bytes=spare_bytes)
        plan = replace(plan, **least)
        self._known.write(name, plan.to_dict())
        return plan

    @cached_property
    def _planner(self) -> ChunkedPlanner:
        with self._known.together("searches"):
            return ChunkedPlanner([way for each in self._ways for way in each.ways()], self._objective)
