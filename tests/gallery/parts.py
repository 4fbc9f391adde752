"""What cases share: layers, stacks of blocks, inputs, and the usual way to checkpoint a user's blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8

Example: TypeAlias = tuple[nn.Module, Any, Callable[[Any], Any]]
"""A model, its inputs and its loss, as `model=python` takes them from a user's factory."""


class Blocks(nn.Module):
    """Blocks one after the other, then a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.head = linear()

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output of the head, `(B, WIDTH)`."""
        for block in self.blocks:
            x = block(x)
        return self.squared(x)

    def squared(self, x: torch.Tensor) -> Any:
        """Return the squared output of the head."""
        return self.head(x).square()


class Rooted(Blocks):
    """Blocks whose input requires a gradient, as functions that recompute need it."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return what blocks and head make of the sine of `x`."""
        return super().forward(x.sin().requires_grad_())


class Dense(nn.Module):
    """A linear layer, sine and tanh: a block without state, of which a region frees one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> Any:
        """Return `(B, WIDTH)`."""
        return self.linear(x).sin().tanh()


def linear(*, bias: bool = True) -> nn.Linear:
    """Return a square layer."""
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def rows(count: int = 6) -> tuple[torch.Tensor]:
    """Return one input of `count` rows, always the same."""
    return (torch.sin(torch.arange(count * WIDTH) * 1.7).view(count, WIDTH),)


def run_by(model: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Let `call` run the forward of every block, which it gets before the inputs."""
    for block in model.get_submodule("blocks").children():
        block.forward = partial(call, block.forward)
    return model


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    """Let every block run under `torch.utils.checkpoint`, non-reentrant unless `options` say otherwise."""
    return run_by(model, partial(checkpoint, **{"use_reentrant": False, **options}))


class Chain(nn.Module):
    """Blocks one after the other; models override `run` for what they do around them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        """Return the output of the last block."""
        return self.run(x)

    def run(self, x: Any) -> Any:
        """Return what the last block makes of `x`."""
        for block in self.blocks:
            x = block(x)
        return x


class Layer(nn.Module):
    """A linear layer whose output goes through `change`, then tanh, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = linear()

    def forward(self, x: torch.Tensor) -> Any:
        """Return `(B, WIDTH)`."""
        return x + self.change(self.linear(x)).tanh()

    def change(self, h: torch.Tensor) -> Any:
        """Return `h`; classes of users do something else."""
        return h


class Net(Chain):
    """A layer, blocks, a head. Where no blocks are given, one of class `middle` stands between two layers."""

    middle: Callable[[], nn.Module] = Layer

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*(blocks or (Layer(), self.middle(), Layer())))
        self.stem, self.head = linear(), linear()

    def forward(self, x: torch.Tensor) -> Any:
        """Return the output of the head, `(B, WIDTH)`."""
        return self.head(self.run(self.stem(x)))


def mean_square(outputs: torch.Tensor) -> Any:
    """Return a loss."""
    return outputs.square().mean()


def example(model: nn.Module, *inputs: Any, loss: Callable[[Any], Any] = mean_square) -> Example:
    """Return a model with its inputs, which are `rows()` where none are given, and a loss."""
    return model, inputs or rows(), loss


def around(middle: Callable[[], nn.Module]) -> Example:
    """Return an example whose model has `middle()` between two layers."""
    return between(middle())


def between(block: nn.Module) -> Example:
    """Return an example whose model has `block` between two layers."""
    return example(Net(Layer(), block, Layer()))


def three(block: Callable[[], nn.Module], *inputs: Any, loss: Callable[[Any], Any] = mean_square) -> Example:
    """Return an example whose model is three such blocks."""
    return example(Chain(block(), block(), block()), *inputs, loss=loss)
