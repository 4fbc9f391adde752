"""Models that cannot be measured, in plain torch or under the variant: a user needs a clear message."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    example,
    linear,
    mean_square,
    three,
)


class Strict(Layer):
    """A block raises a ValueError with a clear text, in the plain model too."""

    def forward(self, x: Any) -> Any:
        if x.dim() != 4:
            raise ValueError(f"images have four dimensions, these have {x.dim()}")
        return self.linear(x)


def loss_per_row() -> Example:
    """The loss is one number a row, and backward needs a scalar."""
    return Chain(*(Layer() for _ in range(3))), (torch.randn(4, WIDTH),), lambda y: y.square().mean(-1)


def loss_with_logs() -> Example:
    """The loss function returns a tuple of loss and logs."""

    def loss(y: Any) -> Any:
        value = y.square().mean()
        return value, {"rms": value.sqrt().item()}

    return Chain(*(Layer() for _ in range(3))), (torch.randn(4, WIDTH),), loss


def loss_as_python_number() -> Example:
    """The loss function returns item(), a float with no graph."""
    return Chain(*(Layer() for _ in range(3))), (torch.randn(4, WIDTH),), lambda y: y.square().mean().item()


class PlainList(nn.Module):
    """The blocks are in a Python list, so nothing knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = linear()
        self.blocks = [Layer() for _ in range(3)]

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def blocks_in_python_list() -> Example:
    """The container of the blocks is a Python list, not a module, so its blocks have no names and their
    parameters do not train."""
    return example(PlainList(), torch.randn(4, WIDTH))


def inputs_not_in_a_tuple() -> Example:
    """The example input is a tensor and not a tuple of them."""
    return Chain(*(Layer() for _ in range(3))), torch.randn(4, WIDTH), mean_square


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any, skips: Any) -> Any:
        return torch.tanh(self.linear(torch.cat([x, skips.pop()], -1)))


class Hourglass(nn.Module):
    """Blocks pop their skip connections: recomputation finds the list empty."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer() for _ in range(3))
        self.blocks = nn.ModuleList(Up() for _ in range(3))

    def forward(self, x: Any) -> Any:
        skips: list[Any] = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block in self.blocks:
            x = block(x, skips)
        return x


def blocks_pop_their_skips() -> Example:
    """Blocks pop skip connections from a list, which is empty in recomputation: pop raises in backward."""
    return example(Hourglass(), torch.randn(4, WIDTH))


class Memoised(nn.Module):
    """A projection is remembered by the identity of the input, so recomputation saves fewer tensors and
    torch's checkpoint raises."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = linear(), linear()
        self.last: tuple[Any, Any] = None, None

    def forward(self, x: Any) -> Any:
        if self.last[0] is not x:
            self.last = x, torch.sigmoid(self.key(x))
        return self.out(torch.relu(x) * self.last[1])


class Energy(Layer):
    """torch.func.grad inside of a region raises, because it does not support saved-tensor hooks."""

    def forward(self, x: Any) -> Any:
        return x - 0.1 * torch.func.grad(lambda v: torch.tanh(self.linear(v)).square().sum())(x)


class Pulses(Layer):
    """Uses Python's own number of a tensor as data."""

    threshold = 0.0

    def forward(self, x: Any) -> Any:
        keep = x.detach().abs().mean(-1) > self.threshold
        self.threshold = float(x.detach().abs().mean())
        return self.linear(x[keep])


def threshold_of_last_call_changes_shapes() -> Example:
    """The rows that a block keeps depend on what its last call left, so recomputed tensors have other
    shapes and torch's checkpoint raises."""
    return example(Chain(Layer(), Pulses(), Layer()), torch.randn(9, WIDTH))


class Scripted(nn.Module):
    """TorchScript's own autograd does not get on with saved-tensor hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        if flip:
            x = x.flip(0)
        return x + torch.tanh(self.linear(x))


def scripted_blocks() -> Example:
    """The blocks are TorchScript modules, whose interpreter raises a RuntimeError without text in
    backward, because saved-tensor hooks are not for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return three(lambda: torch.jit.script(Scripted()), torch.randn(3, WIDTH))
