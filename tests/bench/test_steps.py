"""The bare loop computes what the harness's step computes: otherwise their times could not be compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.overhead.steps import bare_loop, harness_step
from harness.models.base import Batch
from tests.parity import cases


@pytest.mark.parametrize(
    ("variant", "checkpointed"),
    [
        pytest.param("none", False, id="no checkpointing"),
        pytest.param("full", True, id="full AC against checkpoint by hand"),
    ],
)
def test_trains_the_same_losses(variant: str, monkeypatch: pytest.MonkeyPatch, *, checkpointed: bool) -> None:
    losses: list[float] = []
    cross_entropy = functional.cross_entropy

    def noted(logits: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(logits, targets)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(functional, "cross_entropy", noted)
    experiment = cases.experiment(model="gpt", variant=variant)
    tokens = torch.arange(64).view(4, 16)
    batch = Batch(inputs=(tokens,), targets=tokens)
    trained = []
    for step in (harness_step(experiment, batch), bare_loop(experiment, batch, checkpointed=checkpointed)):
        losses.clear()
        for _ in range(3):
            step()
        trained.append(list(losses))
    assert trained[0] == trained[1]
    assert trained[0][0] > trained[0][2]
