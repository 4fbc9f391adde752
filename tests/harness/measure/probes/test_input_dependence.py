"""A model whose results do not depend on its inputs proves nothing, and is told from one whose do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.measure.probes.input_dependence import ignores_input
from harness.models.base import Batch

TOKENS = torch.tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("given", "reads", "is_dead"),
    [
        pytest.param(torch.ones(2, 2), True, False, id="reads numbers"),
        pytest.param(torch.ones(2, 2), False, True, id="ignores numbers"),
        pytest.param(TOKENS, True, False, id="reads tokens"),
        pytest.param(TOKENS, False, True, id="ignores tokens"),
        pytest.param(torch.ones(2, dtype=torch.int64), False, False, id="no other tokens to try"),
    ],
)
def test_ignores_input(given: Tensor, reads: bool, is_dead: bool) -> None:
    def forward(batch: Batch) -> tuple[Any, Tensor]:
        outputs = batch.inputs[0] * 2 if reads else torch.ones(2)
        return outputs, outputs.sum()

    assert ignores_input(forward, lambda: Batch(inputs=(given.clone(),), targets=None)) is is_dead
