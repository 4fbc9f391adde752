"""Saved tensors come back as what was saved: their type, their attributes, jagged ones with their offsets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from strategies import Strategy
from strategies.ac.budget import Budget
from strategies.ac.full import Full
from strategies.ac.modules import Modules
from strategies.ac.nested import Nested
from strategies.ac.offload import Offload
from strategies.ac.selective_op import SelectiveOp
from tests.strategies.toys import WIDTH

VARIANTS: dict[str, Strategy] = {
    "full": Full(layers_fqn="layers"),
    "full, offloading": Full(layers_fqn="layers", offload=True),
    "full, reentrant": Full(layers_fqn="layers", use_reentrant=True),
    "selective_op": SelectiveOp(layers_fqn="layers"),
    "nested": Nested(layers_fqn="layers", levels=[1]),
    "nested in two": Nested(layers_fqn="layers", levels=[1, 1]),
    "nested, offloading": Nested(layers_fqn="layers", levels=[1], offload={"inputs": [0]}),
    "offload": Offload(layers_fqn="layers"),
}


class Marked(Tensor):
    """A type of tensors of the user's."""


class Times(torch.autograd.Function):
    """A product whose gradient is as large as the saved tensor says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        scale = getattr(factor, "gain", 1.0) * (2.0 if isinstance(factor, Marked) else 1.0)
        return gradients[0] * scale, None


class Block(nn.Module):
    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        times: Tensor = Times.apply(x.sin(), factor)  # type: ignore[no-untyped-call]
        return times


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, factor)
        return x


def with_gain(tensor: Tensor) -> Tensor:
    tensor.gain = 5.0  # type: ignore[attr-defined]
    return tensor


FACTORS: dict[str, Callable[[], Tensor]] = {
    "an attribute": lambda: with_gain(torch.ones(3)),
    "an attribute of a result": lambda: with_gain(torch.ones(3).exp()),
    "a type": lambda: torch.ones(3).as_subclass(Marked),
    "a type and an attribute": lambda: with_gain(torch.ones(3).as_subclass(Marked)),
    "an attribute of a frozen parameter": lambda: with_gain(nn.Parameter(torch.ones(3), requires_grad=False)),
    "nothing": lambda: torch.ones(3),
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("strategy", VARIANTS.values(), ids=VARIANTS)
def test_a_saved_tensor_keeps(strategy: Strategy, factor: Callable[[], Tensor]) -> None:
    gradients = []
    for model in (Pair(), strategy.apply(Pair())):
        x = torch.ones(3, requires_grad=True)
        model(x, factor()).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


class OfJagged(nn.Module):
    """Blocks of rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6, 9]))
        for layer in self.layers:
            x = layer(x)
        return x.values()


@pytest.mark.parametrize("strategy", VARIANTS.values(), ids=VARIANTS)
def test_jagged_tensors_train_as_without(strategy: Strategy) -> None:
    plain = OfJagged()
    gradients = []
    for model in (plain, strategy.apply(copy.deepcopy(plain))):
        values = torch.sin(torch.arange(9.0 * WIDTH)).view(9, WIDTH).requires_grad_()
        model(values).square().sum().backward()
        gradients.append([values.grad, *(each.grad for each in model.parameters())])
    assert all(map(torch.equal, *gradients))  # type: ignore[arg-type]


def test_values_of_jagged_tensors_wait_on_the_host_and_offsets_stay() -> None:
    strategy = VARIANTS["offload"]
    model = strategy.apply(OfJagged())
    outputs = model(torch.ones(9, WIDTH, requires_grad=True))
    # the input of each block, and what its tanh returns, which is the input of the next
    assert strategy.observe(model).offloaded_bytes == 3 * 9 * WIDTH * 4
    outputs.sum().backward()


def test_a_jagged_tensor_that_is_written_after_it_was_saved_is_refused() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.0
            z = y.sin()
            y.mul_(2)
            return z

    class Model(OfJagged):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Writing()])

    outputs = VARIANTS["offload"].apply(Model())(torch.ones(9, WIDTH, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_not_jagged_stay() -> None:
    class Strided(OfJagged):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, values: Tensor) -> Tensor:
            x = torch.nested.as_nested_tensor([values[:4], values[4:6], values[6:]], layout=torch.strided)
            for layer in self.layers:
                x = layer(x)
            return torch.cat(list(x.unbind()))

    plain, gradients = Strided(), []
    for model in (plain, VARIANTS["offload"].apply(copy.deepcopy(plain))):
        values = torch.sin(torch.arange(9.0 * WIDTH)).view(9, WIDTH).requires_grad_()
        model(values).square().sum().backward()
        gradients.append(values.grad)
    assert torch.equal(*gradients)  # type: ignore[arg-type]


class Broken(nn.Module):
    """What a compiler makes two graphs of, with operators between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.between(self.up(x).relu())).sigmoid()
        return result

    def between(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(x) * x
            torch._dynamo.graph_break()
        return x


class WithBroken(nn.Module):
    """A block with a compiled module, and a buffer that no gradient needs."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(WIDTH), Broken()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inside(self.norm(x) + self.shift)
        return result


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(WithBroken() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: nn.Module, *, writes: bool = False) -> list[Tensor | None]:
    """Return the gradients of a step with compiled modules, which may write to a buffer before backward."""
    torch._dynamo.reset()
    counters.clear()
    for layer in model.get_submodule("layers").children():
        layer.get_submodule("inside").compile(backend="aot_eager")
    x = torch.sin(torch.arange(4.0 * WIDTH)).view(4, WIDTH).requires_grad_()
    loss = model(x).square().sum()
    if writes:
        model.get_buffer("layers.1.shift").add_(1.0)
    loss.backward()
    return [x.grad, *(each.grad for each in model.parameters())]


PACKING: dict[str, Strategy] = {
    **{name: each for name, each in VARIANTS.items() if "reentrant" not in name},  # with graphs for no_grad
    "modules": Modules(layers_fqn="layers", recompute=("norm",), discard=("inside.up",)),
    "budget": Budget(layers_fqn="layers", fraction=0.97),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of Dynamo, which hides it
@pytest.mark.parametrize("strategy", PACKING.values(), ids=PACKING)
def test_no_compiler_records_what_packs_between_graphs(strategy: Strategy) -> None:
    expected = trained(Stack())
    of_the_model = counters["frames"]["total"]
    assert all(map(torch.equal, trained(strategy.apply(Stack())), expected))  # type: ignore[arg-type]
    assert counters["frames"]["total"] == of_the_model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of Dynamo, which hides it
def test_what_was_written_to_is_followed_through_compiled_modules() -> None:
    expected = trained(Stack(), writes=True)
    nested = trained(VARIANTS["nested"].apply(Stack()), writes=True)  # which keeps the block's result
    assert all(map(torch.equal, nested, expected))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"inplace operation: 'layers\.1\.shift'"):
        trained(VARIANTS["full"].apply(Stack()), writes=True)
