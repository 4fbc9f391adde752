"""Loops that make gradients in forward: which losses have them, and what they give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from strategies.chunk import ChunkPlan
from tests.strategies.chunk.measuring import training_peak_bytes

ROWS, WIDTH, CLASSES = 24, 8, 64
Loss = Callable[[Tensor, Tensor], Tensor]


class Judged(nn.Module):
    """A linear map of rows, and a loss of what it gives."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=dtype)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.body(x)), labels)


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


def twice_read(logits: Tensor, labels: Tensor) -> Tensor:
    each = rows(logits, labels)
    return each.sum() + each.square().sum()


LOSSES: Mapping[str, tuple[Loss, bool]] = {
    "a mean": (functional.cross_entropy, True),
    "a sum, rooted": (lambda logits, labels: rows(logits, labels).sum().sqrt(), True),
    "a mean of parts": (lambda logits, labels: rows(logits, labels).view(4, -1).sum(1).mean(), True),
    "each row weighs otherwise": (lambda logits, labels: rows(logits, labels).cumsum(0).sum(), False),
    "all rows but some": (lambda logits, labels: rows(logits, labels)[3:].sum(), True),
    "rows are read twice": (twice_read, False),
}


def built(
    loss: Loss, dtype: torch.dtype = torch.float32
) -> tuple[Judged, nn.Module, ChunkPlan, tuple[Tensor, Tensor]]:
    """Return a model, the same in chunks, their plan, and inputs."""
    torch.manual_seed(0)
    model, inputs = Judged(loss, dtype), (torch.randn(ROWS, WIDTH, dtype=dtype), torch.arange(ROWS))
    plan = ChunkPlan.make(model, inputs, training=True)
    return model, plan.apply(copy.deepcopy(model)), plan, inputs


def gradients(model: nn.Module, loss: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(loss.sum(), list(model.parameters()), retain_graph=retain_graph))


@pytest.mark.parametrize(("loss", "is_ahead"), LOSSES.values(), ids=LOSSES)
def test_where_all_rows_have_one_gradient(loss: Loss, is_ahead: bool) -> None:
    model, planned, plan, inputs = built(loss)
    assert any(region.is_ahead for region in plan.regions) is is_ahead
    torch.testing.assert_close(gradients(planned, planned(*inputs)), gradients(model, model(*inputs)))
    assert training_peak_bytes(planned, inputs) == plan.predicted_peak_bytes


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        pytest.param(rows, torch.float32, id="a loss for each row"),
        pytest.param(functional.cross_entropy, torch.half, id="a sum that is not scaled may overflow"),
    ],
)
def test_where_backward_alone_makes_gradients(loss: Loss, dtype: torch.dtype) -> None:
    assert not any(region.is_ahead for region in built(loss, dtype)[2].regions)


def test_a_graph_that_is_kept_may_be_differentiated_again() -> None:
    model, planned, _, inputs = built(functional.cross_entropy)
    expected, loss = gradients(model, model(*inputs)), planned(*inputs)
    for retain_graph in (True, False):
        torch.testing.assert_close(gradients(planned, loss, retain_graph=retain_graph), expected)


def test_hooks_see_what_waits_for_backward_and_no_scores() -> None:
    _, planned, plan, inputs = built(functional.cross_entropy)
    seen: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        planned(*inputs)
    assert plan.regions[0].chunks > 1
    assert all(CLASSES not in shape or WIDTH in shape for shape in seen)
