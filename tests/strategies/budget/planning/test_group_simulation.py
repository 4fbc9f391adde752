"""Groups of blocks: predicted bytes and FLOPs are measured, and gradients are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from strategies.budget.eager.carrying_out import enclose
from strategies.regions.blocks import ModelModules
from tests.strategies.budget.eager.test_carried_out import trained
from tests.strategies.budget.planning.grouping_by_hand import grouped, groups_of
from tests.strategies.budget.small_steps import WIDTH, Gated, WithBlocks, measured_peak_bytes, normed, step_of
from tests.strategies.step.test_plan_capture import captured

DROPS = partial(Gated, 0.1)
ROWS: dict[str, tuple[Callable[[], Gated], list[tuple[int, int]], float]] = {
    "all blocks, nothing kept": (Gated, [(0, 3)], 0.0),
    "all blocks, half kept": (DROPS, [(0, 3)], 0.5),
    "in the middle, a little kept": (DROPS, [(1, 2)], 0.2),
    "two groups, most kept": (DROPS, [(0, 1), (2, 3)], 0.9),
    "between untouched blocks, nothing kept": (DROPS, [(1, 2)], 0.0),
    "batch norms, nothing kept": (normed, [(0, 3)], 0.0),
    "batch norms, half kept": (normed, [(0, 1), (2, 3)], 0.5),
}


@pytest.mark.parametrize(("make", "spans", "share"), ROWS.values(), ids=ROWS)
def test_predicted_bytes_and_flops_are_measured(
    make: Callable[[], Gated], spans: list[tuple[int, int]], share: float
) -> None:
    x = torch.randn(2, 8, WIDTH)
    graph = captured(make(), x)
    assert set(spans) <= {(start, end) for start, end, _ in groups_of(graph).all()}
    plan = grouped(graph, spans, share)
    plain, planned = make(), make()
    enclose(plan, ModelModules(blocks=planned.blocks))
    (expected, _), (found, flops) = trained(plain, x), trained(planned, x)
    assert all(map(torch.equal, [*expected, *plain.buffers()], [*found, *planned.buffers()]))
    assert flops == graph.flops + plan.extra_flops
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plan.predicted_peak_bytes


class TwoResults(nn.Module):
    """Gives a second tensor, which the next block does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return (x + y).sin() * x, y


class AddsUp(WithBlocks):
    """Adds up the second results of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(TwoResults() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, total = x * 1, torch.zeros(())
        for block in self.layers:
            x, y = block(x)
            total = total + y.mean()
        return x + total


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_the_next_block_does_not_take_is_not_held_for_it(share: float) -> None:
    x = torch.randn(2, 8, WIDTH)
    plan = grouped(captured(AddsUp(), x), [(0, 3)], share)
    planned = AddsUp()
    enclose(plan, ModelModules(blocks=planned.blocks))
    assert measured_peak_bytes(planned, [x], step_of(planned, x)) == plan.predicted_peak_bytes
