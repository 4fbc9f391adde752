"""Each operator that a selective region asks about is heard, in forward and again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.predict.policies import policies_heard


class _Counting:
    def __init__(self) -> None:
        self.calls = 0

    def asked(self) -> None:
        self.calls += 1


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
    heard = _Counting()
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    options: dict[str, Any] = {"context_fn": saved} if is_selective else {}
    with policies_heard([heard]):
        output = checkpoint(_body, torch.ones(2, 2, requires_grad=True), use_reentrant=False, **options)
        output.sum().backward()
    assert heard.calls == calls
    with policies_heard([]), create_selective_checkpoint_contexts([])[0]:
        _body(torch.ones(2))
    assert heard.calls == calls
