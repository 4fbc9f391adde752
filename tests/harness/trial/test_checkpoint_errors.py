from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from harness.check import assert_neutral
from harness.trial.checkpoint_errors import described, explained
from strategies.ac.budget import Budget
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
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


class OfAll(nn.Module):
    """A block that reads all that its caller has in a list."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * before, 4)

    def forward(self, found: list[Tensor]) -> Tensor:
        y: Tensor = self.linear(torch.cat(found, dim=1)).tanh()
        return y


class Dense(nn.Module):
    def __init__(self, given: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__()
        self.layers, self.given = nn.ModuleList(OfAll(number) for number in (1, 2, 3)), given

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for block in self.layers:
            found.append(block(self.given(found)))
        return torch.cat(found, dim=1)


_LIST = (
    "it gets a list, which may have changed since forward; call the block with list(x), a copy, or use "
    "ac=offload, ac=nested or ac=budget"
)
_AGAIN = "the recomputation of 'layers.2'"
GROWING: dict[str, tuple[Strategy, str]] = {
    "full": (
        Full(layers_fqn="layers"),
        f"{_AGAIN} raises RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x16 and 12x4); {_LIST}",
    ),
    "selective_op": (
        SelectiveOp(layers_fqn="layers"),
        f"{_AGAIN} does not repeat its forward, needed by operator 'addmm': {_LIST}. torch.utils.",
    ),
}


@pytest.mark.parametrize(("strategy", "message"), GROWING.values(), ids=GROWING)
def test_a_list_that_grows_is_said_with_what_to_do(strategy: Any, message: str) -> None:
    loss = (model := strategy.apply(Dense(lambda found: found)))(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    assert str(explained(raised.value, loss, model)).startswith(message)


FOLLOWED: dict[str, tuple[Strategy, Callable[[list[Tensor]], list[Tensor]]]] = {
    "a copy, under full": (Full(layers_fqn="layers"), list),
    "a copy, under selective_op": (SelectiveOp(layers_fqn="layers"), list),
    "offload": (Offload(layers_fqn="layers"), lambda found: found),
    "nested": (Nested(layers_fqn="layers"), lambda found: found),
    "budget": (Budget(layers_fqn="layers", fraction=0.99), lambda found: found),
}


@pytest.mark.parametrize(("strategy", "given"), FOLLOWED.values(), ids=FOLLOWED)
def test_what_is_said_of_a_list_that_grows_trains(
    strategy: Strategy, given: Callable[[list[Tensor]], list[Tensor]]
) -> None:
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
    assert assert_neutral(lambda: Dense(given), (x,), strategy, quick=True).verdict == "neutral"
