"""Several ways to run one step: the cheapest plan of all; costs and bounds count from the plain step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strategies.budget.planning.chunked_planning import ChunkedPlanner, Way
from strategies.budget.planning.cost import Objective
from strategies.budget.planning.planner import BudgetBelowMinimum, Planner
from tests.strategies.budget.small_steps import WIDTH, Gated, step_of
from tests.strategies.step.test_plan_capture import captured

_WIDE = 256


class Headed(Gated):
    """Blocks and a wide head with its loss, in chunks of the batch that run again in backward."""

    def __init__(self, chunks: int) -> None:
        super().__init__(blocks=2)
        self.head = nn.Linear(WIDTH, _WIDE)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        if self.chunks == 1:
            return self._loss(x)
        losses = [checkpoint(self._loss, part, use_reentrant=False) for part in x.chunk(self.chunks)]
        return torch.stack(losses).mean()

    def _loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(x).logsumexp(-1).mean()
        return loss


def way(chunks: int, objective: Objective) -> Way:
    model, x = Headed(chunks), torch.randn(8, 4, WIDTH)
    step_of(model, x)()
    told: dict[str, Any] | None = {"with_loss": False, "regions": [], "chunks": chunks}
    return Way(planner=Planner(captured(model, x), objective=objective), chunk=None if chunks == 1 else told)


@pytest.mark.parametrize("objective", ["flops", "time"])
def test_the_cheapest_of_all_ways_wins(objective: Objective) -> None:
    ways = [way(chunks, objective) for chunks in (1, 2, 8)]
    planner, plain = ChunkedPlanner(ways, objective), ways[0].planner
    assert planner.minimum_feasible_bytes == min(each.planner.minimum_feasible_bytes for each in ways)
    assert planner.minimum_feasible_bytes < plain.minimum_feasible_bytes
    seen = set()
    for part in range(11):
        least, most = planner.minimum_feasible_bytes, plain.plain_peak_bytes
        budget = least + (most - least) * part // 10
        plan = planner.plan(budget)
        seen.add(plan.chunk and plan.chunk["chunks"])
        possible = [
            (each, each.planner.plan(budget))
            for each in ways
            if each.planner.minimum_feasible_bytes <= budget
        ]
        extra = [each.planner.step_flops - plain.step_flops + own.extra_flops for each, own in possible]
        seconds = [each.planner.step_s - plain.step_s + own.extra_s for each, own in possible]
        if objective == "flops":
            assert plan.extra_flops == min(extra)
        assert plan.predicted_peak_bytes <= budget
        assert plan.extra_s == pytest.approx(min(seconds)) or objective == "flops"
        assert 0 <= plan.lower_bound_extra_flops <= plan.extra_flops
        assert (plan.step_flops, plan.plain_peak_bytes) == (plain.step_flops, most)
        assert plan.proven_minimum_bytes <= plan.minimum_feasible_bytes == least
        assert plan.chunkings == 2
    assert None in seen
    assert len(seen) > 1
    assert planner.plan(plain.plain_peak_bytes).is_plain  # also where a step in chunks takes fewer seconds


def test_the_plan_says_why_there_are_chunks() -> None:
    ways = [way(chunks, "flops") for chunks in (1, 8)]
    planner, smallest = ChunkedPlanner(ways), ways[0].planner.minimum_feasible_bytes
    plan = planner.plan(smallest - 1)
    assert plan.chunk is not None
    assert plan.chunk["why"] == f"without chunks the smallest peak is {smallest / 2**20:.3f} MiB"
    first, second, *_ = plan.describe().splitlines()
    assert "no schedule of these operators, whole or in the one way to chunk them, keeps the budget" in first
    assert second.startswith(f"chunks: {plan.chunk['why']}; loops take ")
    assert not plan.is_plain


def test_refusal_of_a_budget_that_no_way_keeps() -> None:
    ways = [way(chunks, "flops") for chunks in (1, 8)]
    planner = ChunkedPlanner(ways)
    with pytest.raises(BudgetBelowMinimum) as caught:
        planner.plan(planner.minimum_feasible_bytes - 1)
    proven = min(each.planner.bound.minimum_bytes() for each in ways)
    assert caught.value.minimum_feasible_bytes == planner.minimum_feasible_bytes
    assert caught.value.proven_minimum_bytes == proven <= planner.minimum_feasible_bytes
