"""Losses of rows that take the memory of their scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strategies.chunk.loops.score_reuse import log_softmax_over, row_losses

ROWS, CLASSES, IGNORED = 6, 40, 3
_RNG = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_RNG, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (7, 33), (64, 1000), (3, 33_000)], ids=str)
def test_the_kernel_reads_a_row_before_it_writes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    scores = (10 * drawn(*shape)).to(dtype)
    expected = scores.log_softmax(1)
    assert log_softmax_over(scores, 1, half_to_float=False) is scores
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("weight", [None, drawn(CLASSES).abs()], ids=["equal classes", "weighted classes"])
@pytest.mark.parametrize("ignored", [-100, IGNORED], ids=["all rows", "ignored rows"])
def test_losses_and_gradients_are_those_of_the_operators(weight: Tensor | None, ignored: int) -> None:
    given = drawn(ROWS, CLASSES).requires_grad_(), drawn(ROWS, CLASSES).requires_grad_()
    given[1].data.copy_(given[0])
    target = torch.tensor([IGNORED, 0, CLASSES - 1, IGNORED, 7, ignored])
    scores = given[0] * 2
    (losses,) = row_losses(scores, target, weight, 0, ignored)
    expected = functional.cross_entropy(given[1] * 2, target, weight, ignore_index=ignored, reduction="none")
    assert torch.equal(losses, expected)
    gradient = drawn(ROWS)
    losses.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-12, atol=1e-14)
