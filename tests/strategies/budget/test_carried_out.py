"""Plans carried out: the peak is the predicted one to the byte, and gradients are those of the plain step."""

from __future__ import annotations

import pytest
import torch

from strategies.budget.capture import capture
from strategies.budget.planning import Planner
from tests.strategies.budget.planning_by_hand import enclose
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, step_of


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_peak_is_the_predicted_one_and_gradients_are_equal(dropout: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, WIDTH)
    model = Gated(dropout)
    step_of(model, x)()
    model.zero_grad()
    graph = capture(
        step_of(model, x), model.blocks, device=torch.device("cpu"), standing=[*model.parameters(), x]
    )
    planner = Planner(graph)
    smallest, largest = planner.minimum_feasible_bytes, planner.plain_peak_bytes
    for share in (0.0, 0.3, 0.6, 0.9):
        plan = planner.plan(int(smallest + share * (largest - smallest)))
        plain, planned = Gated(dropout), Gated(dropout)
        for block in plan.blocks:
            if not block.plain:
                enclose(planned.get_submodule(block.fqn), block)
        gradients = []
        for each in (plain, planned):
            torch.manual_seed(1)
            step_of(each, x)()
            gradients.append([parameter.grad for parameter in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)
        peak = measured_peak_bytes(planned, [x], step_of(planned, x))
        assert (share, peak) == (share, plan.predicted_peak_bytes)
        assert peak <= plan.budget_bytes
