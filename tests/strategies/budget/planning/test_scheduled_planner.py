"""Plans of blocks whose calls wait for one another, as those of pipeline stages do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.budget.eager import carrying_out
from strategies.budget.plan import Plan
from strategies.budget.planning.block_options import Option
from strategies.budget.planning.planner import BudgetBelowMinimum, Planner
from strategies.budget.planning.scheduled_planner import ScheduledPlanner
from strategies.regions.blocks import ModelModules
from strategies.step.plan_capture import capture
from strategies.step.step_graph import StepGraph
from tests.strategies.budget.planning.test_simulation import Flops
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, remembering

_CPU = torch.device("cpu")

SCHEDULES = {
    "all forwards first": "F0 F1 F2 B0 B1 B2",
    "two in flight": "F0 F1 B0 F2 B1 B2",
    "one after the other": "F0 B0 F1 B1 F2 B2",
}


def inputs() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, 8, WIDTH) for _ in range(3)]


def step_of(model: nn.Module, xs: list[Tensor], schedule: str) -> Callable[[], None]:
    """Return what runs a step of micro-batches as a schedule orders them."""

    def run() -> None:
        model.zero_grad()
        losses: dict[str, Tensor] = {}
        for action in schedule.split():
            if action[0] == "F":
                losses[action[1]] = model(xs[int(action[1])]).square().mean()
            else:
                losses.pop(action[1]).backward()

    return run


@cache
def graph(schedule: str, dropout: float, blocks: int = 2) -> StepGraph:
    model, xs = Gated(dropout, blocks), inputs()
    modules = ModelModules(blocks=model.blocks)
    run = step_of(model, xs, SCHEDULES[schedule])
    found = capture(run, modules, device=_CPU, standing=[*model.parameters(), *xs])
    return replace(found, stages=(1,))


@cache
def planner_of(schedule: str) -> ScheduledPlanner:
    return remembering(ScheduledPlanner(graph(schedule, 0.0), nests=False))


def trained(model: nn.Module, schedule: str) -> tuple[list[Any], int]:
    """Return gradients and the state of the generator, and the FLOPs of a step."""
    torch.manual_seed(1)
    with Flops() as flops:
        step_of(model, inputs(), SCHEDULES[schedule])()
    return [*(each.grad for each in model.parameters()), torch.get_rng_state()], flops.count


def carried_out(plan: Plan, dropout: float, blocks: int = 2) -> Gated:
    model = Gated(dropout, blocks)
    carrying_out.enclose(plan, ModelModules(blocks=model.blocks))
    return model


@pytest.mark.parametrize(
    ("schedule", "dropout"),
    [
        ("all forwards first", 0.1),
        ("two in flight", 0.0),
        pytest.param("all forwards first", 0.0, marks=pytest.mark.matrix),
        pytest.param("two in flight", 0.1, marks=pytest.mark.matrix),
        pytest.param("one after the other", 0.1, marks=pytest.mark.matrix),
    ],
)
def test_the_peak_is_the_predicted_one_and_gradients_are_equal(schedule: str, dropout: float) -> None:
    planner = ScheduledPlanner(graph(schedule, dropout), nests=False)
    xs, plain = inputs(), Gated(dropout, 2)
    run = step_of(plain, xs, SCHEDULES[schedule])
    assert measured_peak_bytes(plain, xs, run) == planner.plain_peak_bytes
    expected, step_flops = trained(Gated(dropout, 2), schedule)
    smallest, largest = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    costs = []
    for share in (0.0, 0.4):
        plan = planner.plan(int(smallest + share * (largest - smallest)))
        model = carried_out(plan, dropout)
        found, flops = trained(model, schedule)
        assert all(map(torch.equal, expected, found))
        assert flops == step_flops + plan.extra_flops
        peak = measured_peak_bytes(model, xs, step_of(model, xs, SCHEDULES[schedule]))
        assert (share, peak) == (share, plan.predicted_peak_bytes)
        assert peak <= plan.budget_bytes
        assert plan.extra_flops >= plan.lower_bound_autograd_flops >= plan.lower_bound_extra_flops
        costs.append(plan.extra_flops)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_no_other_choice_of_the_options_is_much_cheaper(schedule: str, share: float) -> None:
    """All pairs of options of two blocks are simulated; within 5 % of a step, the plan is the cheapest."""
    planner = planner_of(schedule)
    smallest, largest = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    budget = int(smallest + share * (largest - smallest))
    least = min(
        sum(each.effect.flops for each in chosen)
        for chosen in every_choice(planner)
        if planner._peak_bytes(chosen) <= budget
    )
    extra = planner.plan(budget).extra_flops
    assert extra - least <= 0.05 * planner.step_flops


def every_choice(planner: ScheduledPlanner) -> Iterator[list[Any]]:
    """Yield all choices for two blocks, of some of their options."""
    first, second = (
        [planner._decided(start, option.decision) for option in stage.options[::4]]
        for start, stage in enumerate(planner._stages)
    )
    yield from (list(each) for each in product(first, second))


def test_a_budget_counts_all_calls_in_flight() -> None:
    planners = [planner_of(schedule) for schedule in SCHEDULES]
    most, two, one = (planner.plain_peak_bytes for planner in planners)
    assert one < two < most
    plans = [planner.plan(one) for planner in planners]
    assert [plan.is_plain for plan in plans] == [False, False, True]
    assert all(plan.predicted_peak_bytes <= one for plan in plans)


def test_a_budget_below_the_smallest_peak_is_refused() -> None:
    planner = planner_of("all forwards first")
    with pytest.raises(BudgetBelowMinimum) as refused:
        planner.plan(planner.minimum_feasible_bytes // 2)
    assert refused.value.minimum_feasible_bytes == planner.minimum_feasible_bytes


def test_a_whole_model_leaves_blocks_that_are_called_several_times_as_they_are() -> None:
    whole = Planner(replace(graph("two in flight", 0.0), stages=()))
    assert whole.minimum_feasible_bytes == whole.plain_peak_bytes


@contextmanager
def _refused(words: str) -> Iterator[None]:
    with pytest.raises(StrategyError) as refused:
        yield
    assert str(refused.value) == words


def test_a_plan_of_other_stages_is_refused() -> None:
    plan = planner_of("two in flight").plan(planner_of("one after the other").plain_peak_bytes)
    assert [block.fqn for block in plan.of_stage({"layers.1", "layers.9"}).blocks] == ["layers.1"]
    with _refused(
        "ac.plan_file: was made for stages 1 of a pipeline, which have none of layers.9; "
        "use the plan of this rank"
    ):
        plan.of_stage(["layers.9"])


class CalledTwice(Gated):
    """Blocks of one program of which one is followed by a sum, so that what waits around them differs."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 0, 1, 2):
            y = self.layers[number](x)
            x = y + x.cos() if number % 2 else y * 2
        return x


def test_blocks_that_share_a_list_are_entered_options_of_their_own() -> None:
    model, x = CalledTwice(blocks=3), inputs()[0]
    step = step_of(model, [x], "F0 B0")
    modules = ModelModules(blocks=model.blocks)
    found = ScheduledPlanner(
        capture(step, modules, device=_CPU, standing=[*model.parameters(), x]), nests=False
    )
    stages = list(found._stages)
    keys = [found._callers[found._call_of(start)].key for start in range(len(stages))]
    shared = [start for start, stage in enumerate(stages) if stage.options is stages[-1].options]
    assert len({keys[start] for start in shared}) == len(shared) == 2
    options: dict[object, list[Option]] = {
        keys[start]: [stages[start].options[at]] for at, start in enumerate(shared)
    }
    found._enter(stages, [], options)
    assert [stages[start].options[-1] for start in shared] == [options[keys[start]][0] for start in shared]
