from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.measure.parity.backward_order import backward_order

REENTRANT = partial(checkpoint, use_reentrant=False)


class Stack(nn.Module):
    """Linear layers without bias, called in any order."""

    def __init__(self, call: Callable[[nn.ModuleDict, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abc"})

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, x)


CASES = [
    pytest.param(lambda layers, x: layers["c"](layers["b"](layers["a"](x))), "cba", id="in a row"),
    pytest.param(lambda layers, x: layers["a"](layers["c"](layers["b"](x))), "acb", id="in another row"),
    pytest.param(
        lambda layers, x: layers["a"](layers["b"](layers["a"](layers["c"](x)))),
        "bac",
        id="a shared weight last",
    ),
    pytest.param(lambda layers, x: layers["b"](x) + layers["a"](x), "abc", id="side by side, one unused"),
    pytest.param(
        lambda layers, x: layers["c"](checkpoint(layers["a"], layers["b"](x), use_reentrant=False)),
        "cab",
        id="a model with checkpoints of its own",
    ),
    pytest.param(lambda layers, x: layers["b"](x).detach() + layers["a"](x), "acb", id="cut off"),
]


@pytest.mark.parametrize(("call", "expected"), CASES)
def test_gradients_are_named_in_the_order_in_which_autograd_makes_them(
    call: Callable[[nn.ModuleDict, Tensor], Tensor], expected: str
) -> None:
    model = Stack(call)
    parameters = {name.split(".")[1]: parameter for name, parameter in model.named_parameters()}
    made: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _parameter, name=name: made.append(name))
    loss = model(torch.ones(2, 4)).sum()
    order = backward_order(loss, parameters)
    loss.backward()  # type: ignore[no-untyped-call]
    assert "".join(order) == expected
    assert list(order[: len(made)]) == made


def test_a_loss_without_a_graph_names_the_last_registered_first() -> None:
    weights = {name: torch.ones(1) for name in "ab"}
    assert backward_order(torch.ones(()), weights) == ("b", "a")
