"""Plans: within the budget, above the bound, and cheaper with every byte."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from strategies.budget.lower_bound import LowerBound
from strategies.budget.planning import BudgetBelowMinimum, Planner, make_plan
from strategies.budget.step_graph import StepGraph
from tests.strategies.budget.small_steps import WIDTH, Gated
from tests.strategies.budget.test_capture import captured

SHARES = (0.95, 0.85, 0.75, 0.65, 0.55)


@cache
def graph(dropout: float = 0.0) -> StepGraph:
    return captured(Gated(dropout), torch.randn(8, 32, WIDTH))


@cache
def planner(dropout: float = 0.0) -> Planner:
    return Planner(graph(dropout))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_plans_keep_their_budgets_and_never_beat_the_bound(dropout: float) -> None:
    plain = planner(dropout).plain_peak_bytes
    plans = [planner(dropout).plan(int(share * plain)) for share in SHARES]
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(plan.extra_flops >= plan.lower_bound_extra_flops for plan in plans)
    assert [plan.extra_flops for plan in plans] == sorted(plan.extra_flops for plan in plans)
    assert plans[-1].extra_flops > 0


def test_a_budget_that_needs_nothing_gives_a_plain_plan() -> None:
    plan = make_plan(graph(), planner().plain_peak_bytes)
    assert plan.is_plain
    assert "the budget needs nothing" in plan.describe()
    assert (plan.extra_flops, plan.lower_bound_extra_flops) == (0, 0)


def test_a_budget_below_the_minimum_is_refused_with_both_minima() -> None:
    least = planner().minimum_feasible_bytes
    assert planner().plan(least).predicted_peak_bytes == least
    with pytest.raises(BudgetBelowMinimum, match=r"^ac: no plan keeps the step's peak within") as refused:
        planner().plan(least - 1)
    assert refused.value.minimum_feasible_bytes == least
    assert 0 < refused.value.proven_minimum_bytes <= least


def test_what_is_known_to_fit_is_taken_where_stages_say_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Planner._made_stages
    monkeypatch.setattr(
        Planner,
        "_made_stages",
        lambda self: [replace(stage, between=stage.between + (1 << 21)) for stage in made(self)],
    )
    careful = Planner(graph())
    assert careful.plan(careful.minimum_feasible_bytes).predicted_peak_bytes == careful.minimum_feasible_bytes
    assert careful.plan(careful.plain_peak_bytes).is_plain


def test_a_bound_that_finds_no_schedule_proves_nothing() -> None:
    unsure = Planner(graph())
    unsure.bound = LowerBound(replace(graph(), fixed_bytes=unsure.plain_peak_bytes))
    assert unsure.bound.cost(unsure.minimum_feasible_bytes) == math.inf
    assert unsure.plan(unsure.minimum_feasible_bytes).lower_bound_extra_flops == 0


def test_a_plan_says_what_is_kept_and_what_runs_again() -> None:
    plan = planner().plan(int(0.55 * planner().plain_peak_bytes))
    text = plan.describe()
    assert "% extra FLOPs; no schedule of these operators keeps the budget with less than" in text
    block = next(block for block in plan.blocks if not block.plain)
    assert set(block.keep).isdisjoint(block.recompute)
    assert f"{block.fqn}: " in text
