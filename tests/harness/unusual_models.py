"""Modules for `model=python` that are unusual in dtype, mode, inputs or outputs; blocks are in `blocks`."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

_WIDTH = 8
_ROWS = 4

Made = tuple[nn.Module, Any, Callable[..., Any]]


def _square(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def _blocks(width: int = _WIDTH, count: int = 2, rate: float = 0.1) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(width, width), nn.Dropout(rate), nn.Tanh()) for _ in range(count)
    )


class Chain(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:  # type: ignore[attr-defined]
            x = block(x)
        return x


def _chain(*, width: int = _WIDTH, depth: int = 2, rate: float = 0.1) -> Chain:
    return Chain(_blocks(width, depth, rate))


def sized(width: int = _WIDTH, *, depth: int = 2, rate: float = 0.1) -> Made:
    return _chain(width=width, depth=depth, rate=rate), (torch.randn(_ROWS, width),), _square


def any_argument(**arguments: Any) -> Made:
    return sized(**arguments)


class HalfLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name in torch)
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


def half_linears() -> Made:
    """Norms in float32 beside linears in bfloat16."""
    blocks = [
        nn.Sequential(nn.LayerNorm(_WIDTH), HalfLinear(_WIDTH, _WIDTH, dtype=torch.bfloat16))
        for _ in range(2)
    ]
    return Chain(nn.ModuleList(blocks)), (torch.randn(_ROWS, _WIDTH),), _square


def one_weight() -> Made:
    """Two blocks that share a weight."""
    first, second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
    second.weight = first.weight
    return Chain(nn.ModuleList([first, second])), (torch.randn(_ROWS, _WIDTH),), _square


def all_half() -> Made:
    blocks: Any = _blocks()
    for block in blocks:
        block.append(nn.GELU())  # so that a save list keeps less than autograd does
    return Chain(blocks).bfloat16(), (torch.randn(_ROWS, _WIDTH, dtype=torch.bfloat16),), _square


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(_WIDTH, dtype=torch.complex64))
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        filtered: Tensor = self.linear(torch.fft.ifft(torch.fft.fft(x) * self.filter).real)
        return filtered


def fourier() -> Made:
    return Chain(nn.ModuleList(Fourier() for _ in range(2))), (torch.randn(_ROWS, _WIDTH),), _square


def doubles() -> Made:
    return _chain().double(), (torch.randn(_ROWS, _WIDTH, dtype=torch.float64),), lambda x: x.square().mean()


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randint(-8, 8, (_WIDTH, _WIDTH), dtype=torch.int8)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.offset: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.whole.float() * self.scale) + self.offset.float()


def quantised() -> Made:
    """Weights of int8 that a scale is trained for, and a buffer of float64."""
    return Chain(nn.ModuleList(Quantised() for _ in range(2))), (torch.randn(_ROWS, _WIDTH),), _square


class Frozen(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.Dropout(0.5))
        self.backbone.eval().requires_grad_(requires_grad=False)
        self.blocks = _blocks(rate=rate)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.backbone.training
        assert self.blocks.training
        x = self.backbone(x)
        for block in self.blocks:
            x = block(x)
        return x


def frozen_backbone(rate: float = 0.1) -> Made:
    return Frozen(rate), (torch.randn(_ROWS, _WIDTH),), _square


class Overwriting(Chain):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x.mul_(2).clone())
        return output


def overwrites_its_input() -> Made:
    return Overwriting(_blocks()), (torch.ones(_ROWS, _WIDTH),), _square


class ByName(Chain):
    def forward(self, *, image: Tensor, scale: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        output: Tensor = super().forward(image * scale["by"])
        return output


def by_name(rate: float = 0.1) -> Made:
    """Inputs by name alone, one of them a dictionary."""
    inputs = {"image": torch.randn(_ROWS, _WIDTH), "scale": {"by": torch.full((_ROWS, 1), 2.0)}}
    return ByName(_blocks(rate=rate)), inputs, _square


class WithGap(Chain):
    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | float = 0.0) -> Tensor:
        assert mask is None
        output: Tensor = super().forward(x + shift)
        return output


def with_a_gap() -> Made:
    return WithGap(_blocks()), {"shift": torch.ones(_WIDTH), "x": torch.randn(_ROWS, _WIDTH)}, _square


class Differentiating(Chain):
    def forward(self, x: Tensor) -> Tensor:
        assert x.requires_grad
        assert x.is_leaf
        assert x.grad is None
        output: Tensor = super().forward(x)
        return output


def input_with_gradient() -> Made:
    return Differentiating(_blocks()), (torch.randn(_ROWS, _WIDTH, requires_grad=True),), _square


class FromArray(Chain):
    def forward(self, x: Any) -> Tensor:
        output: Tensor = super().forward(torch.from_numpy(x))
        return output


def reads_arrays() -> Made:
    return FromArray(_blocks()), (np.ones((_ROWS, _WIDTH), dtype=np.float32),), _square


def sparse_embedding() -> Made:
    model = nn.Sequential(nn.Embedding(16, _WIDTH, sparse=True), nn.Linear(_WIDTH, _WIDTH))
    block = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.GELU())
    model.add_module("blocks", nn.Sequential(block))
    return model, (torch.arange(_ROWS),), _square


def batch_function(rate: float = 0.1) -> Made:
    def draw(batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, _WIDTH), torch.randint(_WIDTH, (batch_size,))

    return _chain(rate=rate), draw, nn.functional.cross_entropy


class Points:
    """Items with an input by name and a target."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"x": torch.full((_WIDTH,), float(index))}, torch.tensor(index % _WIDTH)


def dataset(rate: float = 0.1) -> Made:
    return _chain(rate=rate), Points(), nn.functional.cross_entropy


class Slots:
    __slots__ = ("array", "queue", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.queue = deque([tensor * 2, "plain"])
        self.array = np.full(2, 3.0)


@dataclass(slots=True)
class Held:
    slots: Slots
    views: Any


class Holding(Chain):
    def forward(self, x: Tensor) -> Held:
        y = super().forward(x)
        return Held(slots=Slots(y), views={"first": y.sin(), "second": {1, 2}}.values())


def odd_outputs() -> Made:
    return Holding(_blocks()), (torch.randn(_ROWS, _WIDTH),), lambda held: held.slots.queue[0].square().mean()


class Remembering(Chain):
    def forward(self, x: Tensor) -> Any:
        self.seen = x
        return super().forward(x)


def loss_reads_model_and_example() -> Made:
    """The loss closes over the module that trains, and over the example that it reads."""
    model, example = Remembering(_blocks()), torch.randn(_ROWS, _WIDTH)

    def loss(outputs: Tensor) -> Tensor:
        assert torch.equal(model.seen, example)
        return (outputs - example).square().mean()

    return model, (example,), loss


class Yielding(Chain):
    def forward(self, x: Tensor) -> tuple[Tensor, Iterator[Tensor]]:
        y = super().forward(x)
        return y, (y for _ in range(2))


def yields_outputs() -> Made:
    return Yielding(_blocks()), (torch.randn(_ROWS, _WIDTH),), lambda outputs: outputs[0].square().mean()


def normed_weights() -> Made:
    """Parametrised weights, with buffers that each forward changes, and one weight used twice."""
    first = parametrizations.spectral_norm(nn.Linear(_WIDTH, _WIDTH))
    blocks = nn.ModuleList([first, parametrizations.weight_norm(nn.Linear(_WIDTH, _WIDTH)), first])
    return Chain(blocks), (torch.randn(_ROWS, _WIDTH),), _square


def not_sized() -> Made:
    return Chain(nn.ModuleList([nn.LazyLinear(_WIDTH)])), (torch.randn(_ROWS, _WIDTH),), _square


def reentrant(model: nn.Module) -> None:
    """Checkpoint blocks, the first of which has an input that requires no gradient."""
    for block in model.get_submodule("blocks").children():
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)  # type: ignore[method-assign]


def nothing_to_train() -> Made:
    return _chain().requires_grad_(requires_grad=False), (torch.randn(_ROWS, _WIDTH),), _square


_ONE = _chain()


def one_for_all() -> Made:
    return _ONE, (torch.randn(_ROWS, _WIDTH),), _square


def one_module_for_all() -> nn.Module:
    return _ONE


_TABLE = torch.ones(1)


class OfTheFile(Chain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x * float(_TABLE.item()))


def reads_a_tensor_of_the_file() -> Made:
    return OfTheFile(_blocks()), (torch.randn(_ROWS, _WIDTH),), _square


def many_losses() -> Made:
    return _chain(), (torch.randn(_ROWS, _WIDTH),), lambda outputs: outputs.square().mean(dim=0)


def input_with_history() -> Made:
    return _chain(), (torch.randn(_ROWS, _WIDTH, requires_grad=True) * 2,), _square


def whole_targets() -> Made:
    targets = torch.randn(_ROWS, _WIDTH)
    return _chain(), (torch.randn(_ROWS, _WIDTH),), lambda outputs: (outputs - targets).square().mean()


def short_batches() -> Made:
    return _chain(), lambda batch_size: (torch.randn(batch_size, _WIDTH), torch.zeros(1)), _square


def a_tensor_for_inputs() -> Made:
    return _chain(), torch.randn(_ROWS, _WIDTH), _square


def wrong_names() -> Made:
    return _chain(), {"y": torch.randn(_ROWS, _WIDTH)}, _square


def recurrent(kind: str) -> Made:
    """Blocks of one recurrent layer, whose list of weights is an attribute beside its parameters."""
    layer = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[kind]
    blocks = [_FirstOf(layer(_WIDTH, _WIDTH, batch_first=True)) for _ in range(3)]
    return (
        nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks))),
        (torch.randn(_ROWS, 6, _WIDTH),),
        _square,
    )


class _FirstOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]
