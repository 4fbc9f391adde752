"""Gradients are those of the loss, are not, or nobody can tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.measure.probes.finite_differences import slope
from tests.toy_trainee import toy_batches, toy_trainee

_CLOCK = itertools.count(1)


def _noisy(x: Tensor) -> Tensor:
    return x * (1 + 1e-3 * next(_CLOCK))


def _doubled(x: Tensor) -> Tensor:
    outputs = x.tanh()
    outputs.register_hook(lambda gradient: 2 * gradient)
    return outputs


class Applying(nn.Module):
    """Two linears with a function between."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.two(self.function(self.one(x)))
        return outputs


@pytest.mark.parametrize(
    ("function", "agrees", "unclear"),
    [
        pytest.param(torch.tanh, True, "", id="smooth"),
        pytest.param(torch.relu, True, "", id="kinks that are not met"),
        pytest.param(lambda x: functional.dropout(x, 0.5), True, "", id="dropout of one seed"),
        pytest.param(lambda x: x.sign().detach() * 1e-3 + x, True, "", id="steps that are not met"),
        pytest.param(lambda x: x + (x.round() - x).detach(), False, "", id="a straight-through estimator"),
        pytest.param(_doubled, False, "", id="a gradient that is too large"),
        pytest.param(_noisy, True, "do not agree", id="noise"),
        pytest.param(lambda x: x.float().sin().double(), True, "do not agree", id="half the digits"),
    ],
)
def test_slope(function: Callable[[Tensor], Tensor], agrees: bool, unclear: str) -> None:
    (batch,) = toy_batches(1, 4, 8)
    found = slope(
        lambda: toy_trainee(lambda: Applying(function)), lambda: batch, seed=0, device=torch.device("cpu")
    )
    assert (found.agrees, unclear in found.unclear, bool(found.unclear)) == (agrees, True, bool(unclear))
