from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from harness.trial.checkpoint_errors import described, explained
from strategies.ac.full import Full
from strategies.ac.selective_op import SelectiveOp
from strategies.base import Strategy


class Changing(nn.Module):
    """A block whose recomputation runs another way than its forward."""

    def __init__(self, again: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.again = again
        self.is_again = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = self.again(y) if self.is_again else y.sin().exp()
        self.is_again = True
        return z.cos()


class Model(nn.Module):
    def __init__(self, again: Callable[[Tensor], Tensor], *, is_own: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), Changing(again)])
        self.is_own = is_own

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        x = first(x)
        y: Tensor = checkpoint(second, x, use_reentrant=False) if self.is_own else second(x)
        return y


@pytest.mark.parametrize("is_own", [pytest.param(True, id="the model's own checkpoint"), False])
@pytest.mark.parametrize(
    ("again", "operator", "torchs_words"),
    [
        pytest.param(
            lambda y: y.repeat(2, 1).sin().exp(), "sin", "have different metadata", id="another shape"
        ),
        pytest.param(lambda y: y, "exp", "A different number of tensors", id="fewer tensors"),
        pytest.param(
            lambda y: y.sin().double().exp(), "exp", "have different metadata", id="another dtype on the way"
        ),
    ],
)
def test_block_and_operator_are_named(
    again: Callable[[Tensor], Tensor], operator: str, torchs_words: str, is_own: bool
) -> None:
    model: nn.Module = Model(again, is_own=is_own)
    if not is_own:
        model = Full(layers_fqn="layers", early_stop=False).apply(model)
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(CheckpointError) as raised:
        loss.backward()
    message = str(described(raised.value, loss, model))
    assert message.startswith(
        f"the recomputation of 'layers.1' does not repeat its forward, needed by operator {operator!r}: "
    )
    assert torchs_words in message
    assert "Tip" not in message


def test_an_error_from_elsewhere_keeps_torchs_words() -> None:
    parameter = torch.ones((), requires_grad=True)
    error: Any = CheckpointError("torch.utils.checkpoint: odd\n\nTip: try this")
    assert str(described(error, parameter * 2, nn.Linear(1, 1))) == "torch.utils.checkpoint: odd"


class Doubles(nn.Module):
    """A block that changes its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mul_(2))
        return y.tanh()


@pytest.mark.parametrize(
    "strategy", [Full(layers_fqn="1"), SelectiveOp(layers_fqn="1")], ids=["full", "selective"]
)
def test_a_block_that_changes_its_argument_is_named(strategy: Strategy) -> None:
    model = strategy.apply(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Doubles())))
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    message = str(explained(raised.value, loss, model))
    expected = (
        "'1.0' cannot be recomputed: an argument of it is changed in place; perhaps x.clone() helps. one of"
    )
    assert message.startswith(expected)
    assert "Hint" not in message


def test_what_no_recomputation_raises_is_left_alone() -> None:
    error = RuntimeError("one of the variables has been modified by an inplace operation")
    assert explained(error, torch.ones((), requires_grad=True) * 2, nn.Linear(1, 1)) is None
