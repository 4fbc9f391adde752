"""What a model keeps from step to step is seen, and what it fills once is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.measure.probes.leak import STEPS, growth
from harness.measure.probes.micro_batches import MicroBatched
from harness.models.base import joined
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
        if self.how == "beside" and not self.kept:
            self.kept.append(outputs.repeat(99, 1).cos())
        if self.how in {"each", "beside"} or (self.how == "once" and not self.kept):
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


def test_what_grows_is_named_and_not_what_is_large() -> None:
    batch = toy_batches(1, 4, 8)[0]
    found = growth(toy_trainee(lambda: Keeping("beside")), lambda: batch, seed=0, device=torch.device("cpu"))
    assert found.live_bytes[0] > 99 * found.bytes_per_step > 0
    assert found.made_by == "aten.addmm.default in 'linear'"  # as much as the sine, which keeps it


def test_a_step_of_several_micro_batches_leaves_what_each_leaves() -> None:
    parts = toy_batches(2, 4, 8)
    (alone, whole) = (
        growth(
            MicroBatched(inner=toy_trainee(lambda: Keeping("each")), is_variant=True),
            lambda count=count: joined(parts[:count]),  # type: ignore[misc]
            seed=0,
            device=torch.device("cpu"),
        )
        for count in (1, 2)
    )
    assert whole.bytes_per_step == 2 * alone.bytes_per_step
