"""Plans of one picture, which loops along its rows make small: bytes as predicted, results as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.base import PlannedStep
from strategies.chunk import ChunkPlan
from tests.strategies.chunk.measuring import forward_peak_bytes, loss_of, training_peak_bytes


class Residual(nn.Module):
    """Norm and convolution of two joined pictures, twice, and a shortcut around both."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(3, 24), nn.GroupNorm(2, 8)))
        self.first, self.second = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = nn.Conv2d(24, 8, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat((x, skip), 1)
        y = self.first(functional.silu(self.norms[0](x)))
        y = self.second(functional.silu(self.norms[1](y)))
        result: Tensor = self.shortcut(x) + y
        return result


class Rolled(nn.Module):
    """A norm of which a loop copies the last pass, since its result is read as a whole, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 16)
        self.down, self.up = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y = self.down(functional.silu(x)).relu() * x.roll(1, 2)[:, :8]
        result: Tensor = self.up(y) + x
        return result


class Ladder(nn.Module):
    """Convolutions down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 32, 7, 2, 3), nn.Conv2d(32, 3, 3, padding=1)
        self.inner = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.down(x).relu(), 3, 2, 1)
        x = functional.interpolate(self.inner(x).relu(), scale_factor=4)
        result: Tensor = self.up(x.tanh())
        return result


CASES = {
    "residual": (Residual, lambda: (torch.randn(1, 16, 32, 32), torch.randn(1, 8, 32, 32)), 0.45),
    "rolled": (Rolled, lambda: (torch.randn(1, 16, 16, 16),), 0.75),
    "ladder": (Ladder, lambda: (torch.randn(1, 3, 32, 32),), 0.25),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_forward_of_one_picture_needs_a_share_of_its_bytes(name: str) -> None:
    torch.manual_seed(0)
    make, sample, share = CASES[name]
    model, inputs = make().eval(), sample()
    plan = ChunkPlan.make(model, inputs)
    planned = plan.apply(copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(planned(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert forward_peak_bytes(planned, inputs) == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes <= share * plan.unchunked_peak_bytes


def test_a_step_of_one_picture_needs_a_share_of_its_bytes() -> None:
    torch.manual_seed(0)
    model, inputs = Ladder(), (torch.randn(1, 3, 32, 32),)
    plan = ChunkPlan.make(model, inputs, training=True, step=PlannedStep(loss=loss_of, loss_inputs=()))
    planned = plan.apply(copy.deepcopy(model))
    assert training_peak_bytes(planned, inputs) == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes <= 0.5 * plan.unchunked_peak_bytes
    for each in (model, planned):
        loss_of(each(*inputs)).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(model.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).abs().max() <= 1e-5 * one.grad.abs().max()
