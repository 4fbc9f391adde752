"""Plans of batches of pictures: bytes as predicted, and no more than one picture needs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from strategies.base import PlannedStep
from strategies.chunk import ChunkPlan
from strategies.chunk.show import code_view
from tests.strategies.chunk.measuring import forward_peak_bytes
from tests.strategies.chunk.models import PictureBlock

B, C, ROWS = 4, 8, 16


class Model(nn.Module):
    """Two blocks, and one number a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, C, 3, padding=1)
        self.layers = nn.ModuleList(PictureBlock(C) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3))


class Meeting(Model):
    """The same, less what all samples have in common."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - x.mean(0)


@pytest.mark.parametrize(("share", "batch"), [(0.3, 1), (None, 1)])
def test_a_batch_of_pictures_runs_in_chunks_within_the_budget(share: float | None, batch: int) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(B, 1, ROWS, ROWS)
    plan = ChunkPlan.make(model, (x,), fraction=share)
    assert plan.batch == plan.to_dict()["batch"] == batch
    assert f"chunks of {batch} from its batch" in code_view(plan, model, (x,), PlannedStep())
    planned = plan.apply(copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(planned(x), model(x), rtol=1e-4, atol=1e-5)
    assert forward_peak_bytes(planned, (x,)) == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes <= (share or 0.3) * plan.unchunked_peak_bytes


@pytest.mark.parametrize("training", [False, True])
def test_a_plan_has_no_loop_over_a_batch_whose_samples_meet_or_that_is_trained(*, training: bool) -> None:
    model, x = Model() if training else Meeting().eval(), torch.randn(B, 1, ROWS, ROWS)
    assert ChunkPlan.make(model, (x,), fraction=0.8, training=training).batch is None
