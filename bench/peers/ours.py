"""Plans of `ac=budget` for a workload: at a peer's peak, and with less to choose from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.peers.workload import Workload
from harness.measure.step import runnable_step
from harness.trial.assemble import Assembled
from harness.trial.steps import UNMEASURED_STEPS
from strategies.ac.budget import Budget
from strategies.base import StrategyError
from strategies.budget.compiled import compiled_planning
from strategies.budget.eager import carrying_out
from strategies.budget.plan import Plan
from strategies.budget.planning.block_options import Option
from strategies.budget.planning.planner import BudgetBelowMinimum, Planner
from strategies.budget.planning.simulation import PLAIN, peak_bytes
from strategies.step.plan_capture import capture
from strategies.step.step_graph import StepGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """What one budget costs when less can be chosen; costs are percent of a step's FLOPs.

    Fields:
        workload: its name.
        share: the budget, of the peak without activation checkpointing.
        bound: no schedule costs less.
        exact: the plan's cost.
        greedy: blocks give way one decision after the other, that of most bytes a FLOP first.
        uniform: one decision for all blocks.
        whole_blocks: each block keeps all or nothing.

    A cost is `None` where no such plan keeps the budget.
    """

    workload: str
    share: float
    bound: float | None
    exact: float | None
    greedy: float | None
    uniform: float | None
    whole_blocks: float | None


_COMPILER = "aot_eager"
_COMPILED = ("ac=budget", "ac.executor=compiled", f"compile={_COMPILER}")


class Ours(Planner):
    """The planner of a workload, and lesser ones on the same options."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        graph = step_graph(workload)
        super().__init__(graph, nests=False)
        self._alike = list(self._same_everywhere())
        self._nesting = Planner(graph)

    def at(self, budget_bytes: int) -> Plan | None:
        """Return the plan for a budget; `None` where there is none."""
        return plan_at(self._nesting, budget_bytes)

    def compiled_at(self, budget_bytes: int) -> Plan | None:
        """Return the plan for blocks that are compiled; `None` where there is none, or they cannot be."""
        if self._compiled is None:
            return None
        planner, of_compiler = self._compiled
        plan = plan_at(planner, budget_bytes)
        return None if plan is None else of_compiler(plan)

    @cached_property
    def _compiled(self) -> tuple[Planner, Callable[[Plan], Plan]] | None:
        trainee = self.workload.trainee()
        step = replace(runnable_step(trainee, self.workload.batch(UNMEASURED_STEPS)), compiler=_COMPILER)
        try:
            graph, of_compiler = compiled_planning.captured(
                step, ac_of(self.workload).modules_of(trainee.model)
            )
        except StrategyError:
            return None
        return Planner(graph, nests=False, is_taped=False), of_compiler

    def bound_percent(self, budget_bytes: int) -> float | None:
        """Return the cost that no schedule within a budget is below; `None` where no schedule fits."""
        return self._percent(self.bound.cost(budget_bytes))

    def ablation(self, share: float) -> Ablation:
        """Return what a budget costs by each way to choose."""
        budget = int(share * self.plain_peak_bytes)
        plan = self.at(budget)
        return Ablation(
            workload=self.workload.name,
            share=share,
            bound=self.bound_percent(budget),
            exact=None if plan is None else self._percent(plan.extra_flops),
            greedy=self._percent(self._greedy(budget)),
            uniform=self._percent(
                min((cost for peak, cost in self._alike if peak <= budget), default=math.inf)
            ),
            whole_blocks=self._percent(self._whole_blocks(budget)),
        )

    def _percent(self, flops: float) -> float | None:
        return 100 * flops / self._graph.flops if math.isfinite(flops) else None

    def _same_everywhere(self) -> Iterator[tuple[int, int]]:
        """Yield peak and FLOPs of each decision that all blocks can take."""
        decisions = dict.fromkeys(option.decision for stage in self._stages for option in stage.options)
        if len({caller.call.program for caller in self._callers}) > 1:
            return
        for decision in decisions:
            yield self._outcome([caller.option(decision) for caller in self._callers])

    def _outcome(self, chosen: Sequence[Option]) -> tuple[int, int]:
        return self._highest(chosen), sum(option.effect.flops for option in chosen)

    def _highest(self, chosen: Sequence[Option]) -> int:
        return peak_bytes(self._graph, [option.effect for option in chosen])

    def _greedy(self, budget_bytes: int) -> float:
        chosen = [caller.option(PLAIN) for caller in self._callers]
        while self._highest(chosen) > budget_bytes:
            changes = [
                (_density(chosen[number], option), number, option.decision)
                for number, stage in enumerate(self._stages)
                for option in stage.options
                if option.left_bytes < chosen[number].left_bytes
            ]
            if not changes:
                return math.inf
            _, number, decision = max(changes, key=lambda change: change[0])
            chosen[number] = self._callers[number].option(decision)
        return self._outcome(chosen)[1]

    def _whole_blocks(self, budget_bytes: int) -> float:
        """Return the cost of the first blocks that keep nothing: as few of them as fit, all being alike."""
        plain = [caller.option(PLAIN) for caller in self._callers]
        nothing = [caller.option(_NOTHING) for caller in self._callers]
        for count in range(len(plain) + 1):
            peak, flops = self._outcome([*nothing[:count], *plain[count:]])
            if peak <= budget_bytes:
                return flops
        return math.inf


def step_graph(workload: Workload) -> StepGraph:
    """Return the step that peers are measured in, on its data: tokens go to the same experts."""
    trainee = workload.trainee()
    step = runnable_step(trainee, workload.batch(UNMEASURED_STEPS))
    modules = ac_of(workload).modules_of(trainee.model)
    with step.around():
        return capture(step.run, modules, device=torch.device("cpu"), standing=step.standing)


_NOTHING = type(PLAIN)()


def _density(now: Option, then: Option) -> float:
    """Return the bytes that a change frees for a FLOP."""
    added = then.effect.flops - now.effect.flops
    freed = now.left_bytes - then.left_bytes
    return math.inf if added <= 0 else freed / added


def ac_of(workload: Workload) -> Budget:
    """Return `ac=budget` of a workload, which has found its blocks."""
    ac = workload.experiment("ac=budget", "ac.fraction=1.0").ac
    assert isinstance(ac, Budget), "it was asked for"
    return ac


def plan_at(planner: Planner, budget_bytes: int) -> Plan | None:
    """Return the plan for a budget; `None` where there is none."""
    try:
        return planner.plan(budget_bytes)
    except BudgetBelowMinimum:
        return None


def trained_by(plan: Plan, workload: Workload) -> Assembled:
    """Return a trainee with a plan, after the steps that nobody measures."""
    if plan.executor == "compiled":
        with TemporaryDirectory() as folder:
            file = Path(folder, "plan.json")
            plan.save(file)
            return workload.trainee(workload.experiment(*_COMPILED, f"ac.plan_file={file}"))

    def change(trainee: Assembled) -> None:
        carrying_out.enclose(plan, ac_of(workload).modules_of(trainee.model))

    return workload.trainee(change=change)
