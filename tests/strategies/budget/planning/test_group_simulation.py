"""Groups of blocks: predicted bytes and FLOPs are measured, and gradients are those of the plain model."""

from __future__ import annotations

import pytest
import torch

from strategies.budget.eager.carrying_out import enclose
from strategies.regions.blocks import ModelModules
from tests.strategies.budget.eager.test_carried_out import trained
from tests.strategies.budget.planning.grouping_by_hand import grouped
from tests.strategies.budget.small_steps import WIDTH, Gated, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured

ROWS = {
    "all blocks, nothing kept": (0.0, [(0, 3)], 0.0),
    "all blocks, half kept": (0.1, [(0, 3)], 0.5),
    "in the middle, a little kept": (0.1, [(1, 2)], 0.2),
    "two groups, most kept": (0.1, [(0, 1), (2, 3)], 0.9),
    "between untouched blocks, nothing kept": (0.1, [(1, 2)], 0.0),
}


@pytest.mark.parametrize(("dropout", "spans", "share"), ROWS.values(), ids=ROWS)
def test_predicted_bytes_and_flops_are_measured(
    dropout: float, spans: list[tuple[int, int]], share: float
) -> None:
    x = torch.randn(2, 8, WIDTH)
    graph = captured(Gated(dropout), x)
    plan = grouped(graph, spans, share)
    planned = Gated(dropout)
    enclose(plan, ModelModules(blocks=planned.blocks))
    (expected, _), (found, flops) = trained(Gated(dropout), x), trained(planned, x)
    assert all(map(torch.equal, expected, found))
    assert flops == graph.flops + plan.extra_flops
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plan.predicted_peak_bytes
