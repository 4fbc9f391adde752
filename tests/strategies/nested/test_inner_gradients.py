"""Blocks that differentiate in their forward, as force fields do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import Strategy
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
from strategies.ac.selective_op import SelectiveOp
from tests.strategies.toys import WIDTH, Layers


class Field(nn.Module):
    """A block whose result has a gradient in it."""

    def __init__(self, act: Callable[[Field, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), act
        self.dropout = nn.Dropout(0.5)

    def energy(self, x: Tensor) -> Tensor:
        energy: Tensor = self.dropout(self.linear(x)).sin().square().sum()
        return energy

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def three_fields(act: Callable[[Field, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Layers(*(Field(act) for _ in range(3)))


def of_input(m: Field, x: Tensor) -> Tensor:
    return x + torch.autograd.grad(m.energy(x), x, create_graph=True)[0]


def of_result(m: Field, x: Tensor) -> Tensor:
    y: Tensor = m.linear(x).tanh()
    return x + torch.autograd.grad(m.energy(y), y, create_graph=True)[0]


def of_positions(m: Field, x: Tensor) -> Tensor:
    positions = x.detach().requires_grad_()
    return x + torch.autograd.grad(m.energy(positions), positions, create_graph=True)[0]


def twice(m: Field, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(m.energy(x), x, create_graph=True)
    return x + torch.autograd.grad(first.square().sum(), x, create_graph=True)[0]


def without_graph(m: Field, x: Tensor) -> Tensor:
    return x * torch.autograd.grad(m.energy(x), x, retain_graph=True)[0] + m.energy(x)


def of_parameters(m: Field, x: Tensor) -> Tensor:
    (step,) = torch.autograd.grad(m.energy(x), m.linear.weight, create_graph=True)
    return nn.functional.linear(x, m.linear.weight - 0.1 * step).tanh()  # an inner step of meta-learning


ACTS = {
    "of the input": of_input,
    "of a result": of_result,
    "of positions that are cut off": of_positions,
    "of a gradient": twice,
    "that has no graph": without_graph,
    "of parameters": of_parameters,
}
VARIANTS: dict[str, Strategy] = {
    "one region": Nested(layers_fqn="layers", levels=[1]),
    "one region, to its end": Nested(layers_fqn="layers", levels=[1], early_stop=False),
    "two": Nested(layers_fqn="layers", levels=[2]),
    "regions in a region": Nested(layers_fqn="layers", levels=[1, 3], early_stop=False),
    "regions in a region, no further than needed": Nested(layers_fqn="layers", levels=[1, 3]),
    "the default": Nested(layers_fqn="layers"),
    "offload of its inputs": Nested(layers_fqn="layers", levels=[1], offload={"inputs": [0]}),
    "full": Full(layers_fqn="layers"),
    "selective_op": SelectiveOp(layers_fqn="layers"),
    "offload": Offload(layers_fqn="layers"),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("strategy", VARIANTS.values(), ids=VARIANTS)
def test_gradients_of_three_blocks_with_a_gradient(strategy: Strategy, act: Any) -> None:
    plain, gradients = three_fields(act), []
    for model in (plain, strategy.apply(copy.deepcopy(plain))):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        model(x).square().sum().backward()
        gradients.append([x.grad, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *gradients))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", VARIANTS.values(), ids=VARIANTS)
def test_forces_that_are_trained(strategy: Strategy) -> None:
    plain, gradients = three_fields(lambda m, x: m.dropout(m.linear(x)).sin()), []
    for model in (plain, strategy.apply(copy.deepcopy(plain))):
        torch.manual_seed(1)
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        (forces,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        forces.square().sum().backward()
        gradients.append([x.grad, *(each.grad for each in model.parameters())])
    for expected, actual in zip(*gradients, strict=True):
        assert torch.allclose(expected, actual, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
