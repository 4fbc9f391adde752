"""Own parameters: a recomputation that finds others than forward did is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from strategies import Strategy, StrategyError
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
from strategies.ac.selective_layer import SelectiveLayer
from strategies.ac.selective_op import SelectiveOp
from tests.strategies.toys import WIDTH, Block, Stack

FULL = Full(layers_fqn="layers")
RECOMPUTING = {
    "full": FULL,
    "full, rewinding": Full(layers_fqn="layers", rewind=True),
    "full, offloading": Full(layers_fqn="layers", offload=True),
    "full, reentrant": Full(layers_fqn="layers", use_reentrant=True),
    "selective_layer": SelectiveLayer(layers_fqn="layers", ac_freq=1),
    "selective_op": SelectiveOp(layers_fqn="layers"),
}


def model() -> tuple[Stack, dict[str, Any]]:
    """Return a model, and other parameters for it."""
    torch.manual_seed(0)
    plain = Stack(Block(bias=False, dropout=0.0))
    return plain, {name: (2 * each).detach().requires_grad_() for name, each in plain.named_parameters()}


def loss(plain: nn.Module, others: dict[str, Any]) -> Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(1, 4, WIDTH)
    called: Tensor = functional_call(plain.get_submodule("layers.0"), others, (x.requires_grad_(),))
    return called.square().sum()


@pytest.mark.parametrize("strategy", RECOMPUTING.values(), ids=RECOMPUTING)
def test_a_backward_after_a_functional_call_is_refused(strategy: Strategy) -> None:
    plain, others = model()
    own = {name.removeprefix("layers.0."): each for name, each in others.items()}
    outputs = loss(strategy.apply(plain), own)
    with pytest.raises(StrategyError) as error:
        outputs.backward()
    assert str(error.value) == (
        "ac: a Block ran with other parameters in forward than it has now; "
        "call it in a module that gives it these (torch.func.functional_call)"
    )


class Calling(nn.Module):
    """A block that gives the block in it other parameters, within one region."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.scale = block, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: self.scale * each for name, each in self.block.named_parameters()}
        called: Tensor = functional_call(self.block, scaled, (x,))
        return called


@pytest.mark.parametrize(
    "strategy",
    [FULL, RECOMPUTING["selective_op"], Offload(layers_fqn="layers"), Nested(layers_fqn="layers")],
)
def test_a_functional_call_in_a_region_trains(strategy: Strategy) -> None:
    torch.manual_seed(0)
    plain = Stack(Calling(Block(bias=False, dropout=0.0)))
    gradients = []
    for each in (plain, strategy.apply(copy.deepcopy(plain))):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(1, 4, WIDTH).requires_grad_()
        each.get_submodule("layers.0")(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert all(map(torch.equal, *gradients))  # type: ignore[arg-type]
