"""Chains carried out: bytes are the predicted ones, gradients those of the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from strategies.budget.eager.carrying_out import enclose
from strategies.regions.blocks import ModelModules
from tests.strategies.budget.planning.chaining_by_hand import in_chains
from tests.strategies.budget.planning.test_enumeration import Residual
from tests.strategies.budget.small_steps import WIDTH, GatedBlock, WithBlocks, measured_peak_bytes, step_of
from tests.strategies.step.test_plan_capture import captured


class Tanh(nn.Module):
    """Saves its output, which the next block saves as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


class Writes(nn.Module):
    """Writes to its input in place, which the block before has made."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = torch.sigmoid(self.body(x.mul_(0.5)))
        return outputs


def skip(dropout: float) -> nn.Module:
    return Residual(
        nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
    )


class Mixed(WithBlocks):
    """Blocks of several kinds one after another; one output is read by a later block, too."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, WIDTH)
        blocks = (skip(dropout), Tanh(), GatedBlock(dropout), skip(dropout), Writes(), Tanh(), skip(dropout))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding(x)
        second = y
        for number, block in enumerate(self.layers):
            y = block(y if number != 5 else y + second)
            second = y if number == 1 else second
        return y


X = torch.randint(0, 32, (4, 8))
SPANS = [[(0, 2)], [(1, 3), (4, 6)], [(0, 3), (3, 5)], [(0, 7)]]


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("spans", SPANS, ids=str)
def test_bytes_and_work_are_the_predicted_ones(spans: list[tuple[int, int]], share: float) -> None:
    plain, planned, graph = Mixed(0.1), Mixed(0.1), captured(Mixed(0.1), X)
    plan = in_chains(graph, spans, share, seed=len(spans))
    enclose(plan, ModelModules(blocks=planned.blocks))
    for _ in range(2):  # takes the order down, and follows it
        torch.manual_seed(1)
        step_of(plain, X)()
        torch.manual_seed(1)
        assert measured_peak_bytes(planned, [X], step_of(planned, X)) == plan.predicted_peak_bytes
        gradients = [[each.grad for each in model.parameters()] for model in (plain, planned)]
        assert all(
            a is not None and b is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True)
        )
    assert flops_of(planned) - flops_of(plain) == plan.extra_flops


def flops_of(model: Mixed) -> int:
    with FlopCounterMode(display=False) as counter:
        step_of(model, X)()
    return int(counter.get_total_flops())
