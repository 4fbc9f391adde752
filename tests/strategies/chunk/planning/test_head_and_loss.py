"""Head and loss of a language model: chunks of any batch, whatever stands between logits and the loss.

Shapes: B batch, S sequence, D width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.base import LossInputs, PlannedStep
from strategies.chunk import ChunkPlan
from strategies.chunk.running.chunked_forward import chunked_forwards
from tests.strategies.chunk.measuring import training_peak_bytes

VOCABULARY, WIDTH = 96, 16
Loss = Callable[["Head", Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A linear map to logits of shape (B, S, V), and a loss of them."""

    weights: Tensor

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("weights", torch.rand(VOCABULARY))
        self.loss = loss

    def forward(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        return self.loss(self, self.linear(hidden_BSD), labels_BS)


def entropy(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    flat = logits.reshape(-1, VOCABULARY), labels.flatten()
    return functional.cross_entropy(*flat, **options)  # type: ignore[arg-type]


def with_z(_: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def later_labels(_: Head, logits: Tensor, labels: Tensor) -> Tensor:
    following = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return entropy(logits.float().view(-1, VOCABULARY), following.view(-1), ignore_index=-100)


def of_some(_: Head, logits: Tensor, labels: Tensor) -> Tensor:
    counted = labels > 3
    return (entropy(logits, labels, reduction="none").view(labels.shape) * counted).sum() / counted.sum()


def of_log_softmax(_: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()


def weighted(head: Head, logits: Tensor, labels: Tensor) -> Tensor:
    return entropy(logits, labels, weight=head.weights, label_smoothing=0.1, ignore_index=3)


LOSSES: Mapping[str, Loss] = {
    "cross entropy": lambda _, logits, labels: entropy(logits, labels),
    "sum": lambda _, logits, labels: entropy(logits, labels, reduction="sum"),
    "classes first": lambda _, logits, labels: functional.cross_entropy(logits.transpose(1, 2), labels),
    "shifted": lambda _, logits, labels: entropy(logits[:, :-1], labels[:, 1:]),
    "shifted labels": later_labels,
    "ignored labels": lambda _, logits, labels: entropy(logits, labels, ignore_index=3),
    "class weights": lambda head, logits, labels: entropy(logits, labels, weight=head.weights),
    "label smoothing": lambda _, logits, labels: entropy(logits, labels, label_smoothing=0.1),
    "weights, smoothing and ignored": weighted,
    "z-loss": with_z,
    "softcap": lambda _, logits, labels: entropy(30 * torch.tanh(logits / 30), labels),
    "mean of some": of_some,
    "log softmax": of_log_softmax,
}


def built(loss: str, batch: int, sequence: int) -> tuple[Head, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    hidden_BSD = torch.randn(batch, sequence, WIDTH, requires_grad=True)
    labels_BS = torch.randint(0, VOCABULARY, (batch, sequence))
    return Head(LOSSES[loss]), (hidden_BSD, labels_BS)


def trained(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the loss, and gradients of the weight and of the hidden states."""
    loss = model(*inputs)
    return [loss, *torch.autograd.grad(loss, [*model.parameters(), inputs[0]])]


@pytest.mark.parametrize(
    ("loss", "batch", "sequence", "plain", "smallest", "is_ahead"),
    [
        ("cross entropy", 1, 48, 55_304, 461, True),
        ("cross entropy", 3, 16, 55_304, 461, True),
        ("cross entropy", 24, 2, 55_304, 461, True),
        ("sum", 3, 16, 55_304, 413, True),
        ("classes first", 1, 48, 55_304, 1_212, True),
        ("classes first", 3, 16, 55_304, 3_540, True),
        ("shifted", 1, 48, 54_152, 460, True),
        ("shifted", 3, 16, 53_360, 2_557, True),
        ("shifted labels", 3, 16, 55_304, 845, True),
        ("ignored labels", 3, 16, 55_304, 461, True),
        ("class weights", 1, 48, 55_304, 801, True),
        ("class weights", 3, 16, 55_304, 801, True),
        ("label smoothing", 3, 16, 55_496, 1_368, False),
        ("weights, smoothing and ignored", 3, 16, 73_736, 1_969, False),
        ("z-loss", 3, 16, 92_556, 2_136, False),
        ("softcap", 3, 16, 73_752, 1_228, True),
        ("mean of some", 3, 16, 55_304, 653, True),
        ("log softmax", 3, 16, 55_496, 3_688, True),
    ],
)
def test_logits_are_never_whole(
    loss: str, batch: int, sequence: int, plain: int, smallest: int, is_ahead: bool
) -> None:
    model, inputs = built(loss, batch, sequence)
    plan = ChunkPlan.make(model, inputs, training=True)
    planned = plan.apply(copy.deepcopy(model))
    for actual, expected in zip(trained(planned, inputs), trained(model, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    assert (plan.unchunked_peak_bytes, plan.predicted_peak_bytes) == (plain, smallest)
    assert [region.is_ahead for region in plan.regions] == [is_ahead]
    assert training_peak_bytes(planned, inputs) == smallest
    inputs[0].grad = None
    assert training_peak_bytes(model, inputs) == plain
    assert smallest <= 0.07 * plain


def of_results(logits: Tensor, labels: Tensor) -> Tensor:
    return entropy(logits, labels)


def step_outside(labels: Tensor, *, may_join_loss: bool) -> PlannedStep:
    return PlannedStep(loss=of_results, loss_inputs=(labels,), may_join_loss=may_join_loss)


class Results(Head):
    """A head that returns logits: its loss lies outside."""

    def __init__(self) -> None:
        super().__init__(lambda _, logits, __: logits)

    def forward(self, hidden_BSD: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.linear(hidden_BSD)
        return logits


def test_the_loss_outside_of_the_model_joins_it() -> None:
    torch.manual_seed(0)
    model, (hidden, labels) = Results(), built("sum", 3, 16)[1]
    plan = ChunkPlan.make(
        model, (hidden,), fraction=0.05, training=True, step=step_outside(labels, may_join_loss=True)
    )
    assert plan.unchunked_peak_bytes == 55_304
    assert plan.predicted_peak_bytes <= 0.05 * 55_304
    assert plan.to_dict()["with_loss"]
    planned = plan.apply(copy.deepcopy(model))
    loss = planned(hidden, LossInputs((labels,)))
    expected = of_results(model(hidden), labels)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, model.linear.weight)
    given = torch.autograd.grad(loss, list(planned.parameters()))
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-7)
    assert planned(hidden).shape == (3, 16, VOCABULARY)


@pytest.mark.parametrize(
    ("fraction", "may_join_loss"),
    [pytest.param(0.95, True, id="results as wholes fit"), pytest.param(0.95, False, id="the loss may not")],
)
def test_the_loss_stays_outside(fraction: float, may_join_loss: bool) -> None:
    class Deep(Results):
        def forward(self, hidden_BSD: Tensor) -> Tensor:  # type: ignore[override]
            spread = self.linear(hidden_BSD).tanh().exp().sin()
            logits: Tensor = spread @ self.linear.weight @ self.linear.weight.t()
            return logits

    model, (hidden, labels) = Deep(), built("sum", 3, 16)[1]
    step = step_outside(labels, may_join_loss=may_join_loss)
    plan = ChunkPlan.make(model, (hidden,), fraction=fraction, training=True, step=step)
    planned = plan.apply(model)
    assert plan.regions
    assert not plan.to_dict()["with_loss"]
    assert chunked_forwards(planned)[""].loss is None
