"""What a model keeps from step to step is seen, and what it fills once is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.measure.probes.leak import STEPS, growth
from tests.toy_trainee import toy_batches, toy_trainee


class Keeping(nn.Module):
    """A linear that keeps some of what it computes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        if self.how == "each" or (self.how == "once" and not self.kept):
            self.kept.append(outputs.sin())
        if self.how == "cycle":
            cycle: list[Any] = [outputs.detach().clone()]
            cycle.append(cycle)
        return outputs


@pytest.mark.parametrize(
    ("how", "steps", "bytes_per_step", "is_garbage"),
    [
        pytest.param("none", 4, 0, False, id="keeps nothing"),
        pytest.param("once", 4, 0, False, id="fills a cache"),
        pytest.param("each", STEPS, 2 * 4 * 8 * 4, False, id="appends each output, and its graph the input"),
        pytest.param("cycle", STEPS, 4 * 8 * 4, True, id="leaves a reference cycle"),
    ],
)
def test_growth(how: str, steps: int, bytes_per_step: int, is_garbage: bool) -> None:
    trainee = toy_trainee(lambda: Keeping(how))
    batch = toy_batches(1, 4, 8)[0]
    found = growth(trainee, lambda: batch, seed=0, device=torch.device("cpu"))
    assert (len(found.live_bytes), found.bytes_per_step, found.is_garbage) == (
        *(steps, bytes_per_step),
        is_garbage,
    )
