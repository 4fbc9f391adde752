"""Blocks that look unusual and are right under every variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from tests.gallery.users.authors.stacks import ROWS, WIDTH, Example, Plain, Stack, around, example


class Fourier(nn.Module):
    """A complex weight in frequency space."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=WIDTH)


class Half(nn.Module):
    """A block in bf16 in a model in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape and dtype of `x`."""
        outputs: Tensor = self.linear(x.bfloat16()).to(x.dtype)
        return outputs + x


class FrozenNorm(Plain):
    """Batch statistics that the factory froze with `eval()`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval().requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(self.norm(x))


class Adapted(nn.Module):
    """LoRA on a frozen linear."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return torch.tanh(self.base(x) + x @ self.down.T @ self.up.T)


class Square(torch.autograd.Function):
    """x², with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x²."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # torch's own is *args
        """Return 2x times the gradient."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Squared(Plain):
    """A custom function inside the block."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        squared: Tensor = Square.apply(self.linear(x))
        return squared.tanh()


class TorchDepth(Plain):
    """Stochastic depth by torch's generator, as a mask."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        keep = torch.rand(x.shape[0], 1, device=x.device) < 0.5
        return x + super().forward(x) * keep


class InPlace(Plain):
    """An activation in place that autograd allows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return self.linear(x).relu_()


class Recurrent(nn.Module):
    """A GRU over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        outputs: Tensor = self.cell(x)[0]
        return outputs


class Attending(nn.Module):
    """Torch's own encoder layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        outputs: Tensor = self.layer(x[None])[0]
        return outputs


class Unused(Plain):
    """A parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class Lazily(Plain):
    """Makes a table in its first call and reads it ever after."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        table = torch.arange(WIDTH, dtype=x.dtype, device=x.device).cos()
        return super().forward(x * table)


class Mapped(Plain):
    """A linear mapped over rows by vmap."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        outputs: Tensor = torch.vmap(lambda row: functional.linear(row, self.linear.weight).sin())(x)
        return outputs


class Routed(nn.Module):
    """Two of four experts by their scores, no state."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        outputs = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            outputs = outputs.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return outputs


class Halting(Plain):
    """Repeats itself until its outputs are small: a loop that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        for _ in range(5):
            x = super().forward(x) * 0.7
            if float(x.detach().abs().max()) < 0.3:
                break
        return x


class Reweighted(Plain):
    """Weight norm as a parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(self.linear)


class Hooked(Plain):
    """A forward hook that scales what the linear returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda _module, _inputs, outputs: outputs * 1.5)


@dataclass
class State:
    """What `Carrying` blocks hand on."""

    hidden: Tensor
    total: Tensor


class Carrying(Plain):
    """Takes and returns a dataclass."""

    def forward(self, x: State) -> State:  # type: ignore[override]  # another kind of block
        """Return the next state."""
        hidden = super().forward(x.hidden)
        return State(hidden, x.total + hidden.square().mean())


class CarryingStack(Stack):
    """Hands a dataclass from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        state = State(self.embedding(x), x.new_zeros(()))
        for block in self.blocks:
            state = block(state)
        return self.head(state.hidden) + state.total


class Keyed(Plain):
    """Takes a dictionary by keyword and returns one."""

    def forward(self, *, features: Mapping[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the features with a new `x`."""
        return {**features, "x": super().forward(features["x"]) * features["mask"]}


class KeyedStack(Stack):
    """Hands a dictionary from block to block."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        features = {"x": self.embedding(x), "mask": (x > 0).to(x.dtype)}
        for block in self.blocks:
            features = block(features=features)
        return self.head(features["x"])


class Words(nn.Module):
    """Token ids through an embedding with sparse gradients, tied to no head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH, sparse=True)
        self.blocks = nn.ModuleList([Plain(), Plain()])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (B, S, D)."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Tied(nn.Module):
    """Embedding and head share one weight, and one block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Plain(), Plain()])
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (B, S, V)."""
        x = self.words(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


fourier = partial(around, Fourier)
half = partial(around, Half)
frozen_norm = partial(around, FrozenNorm)
adapted = partial(around, Adapted)
squared = partial(around, Squared)
torch_depth = partial(around, TorchDepth)
in_place = partial(around, InPlace)
recurrent = partial(around, Recurrent)
attending = partial(around, Attending)
unused = partial(around, Unused)
lazily = partial(around, Lazily)
mapped = partial(around, Mapped)
routed = partial(around, Routed)
halting = partial(around, Halting)
reweighted = partial(around, Reweighted)
hooked = partial(around, Hooked)


def double() -> Example:
    """Return a stack in float64."""
    model, (inputs,), loss = around(Plain)
    return model.double(), (inputs.double(),), loss


def carrying() -> Example:
    """Return a stack of blocks that take and return a dataclass."""
    return example(CarryingStack([Carrying() for _ in range(3)]))


def keyed() -> Example:
    """Return a stack of blocks that take and return a dictionary."""
    return example(KeyedStack([Keyed() for _ in range(3)]))


def words() -> Example:
    """Return a model whose embedding has sparse gradients."""
    return Words(), (torch.randint(0, 16, (ROWS, 5)),), lambda outputs: outputs.square().mean()


def tied() -> Example:
    """Return a model of tied weights that calls a block twice."""
    return Tied(), (torch.randint(0, 16, (ROWS, 5)),), lambda outputs: outputs.square().mean()
