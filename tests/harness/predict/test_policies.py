"""Each operator that a selective region asks about is heard, in forward and again."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.predict.policies import policies_counted
from strategies.step.position import Position


def _body(x: Tensor) -> Tensor:
    return x.view(-1).sin().cos()


@pytest.mark.parametrize(
    ("is_selective", "calls"),
    [
        pytest.param(True, 7, id="three operators, then two that detach what they give"),
        pytest.param(False, 0, id="full AC"),
    ],
)
def test_calls_of_a_region(*, is_selective: bool, calls: int) -> None:
    counted: Counter[str] = Counter()
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    options: dict[str, Any] = {"context_fn": saved} if is_selective else {}
    with policies_counted(counted, Position()):
        output = checkpoint(_body, torch.ones(2, 2, requires_grad=True), use_reentrant=False, **options)
        output.sum().backward()
    assert counted["forward"] == calls
    with create_selective_checkpoint_contexts([])[0]:
        _body(torch.ones(2))
    assert counted.total() == calls
