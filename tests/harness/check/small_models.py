"""Small models as users write them, and functions that put checkpoints on them, rightly and wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH = 8


class Block(nn.Module):
    """A residual block; subclasses say what happens between its two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        return torch.dropout(h.tanh(), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = x + self.down(self.between(self.up(x)))
        return outputs


class Stack(nn.Module):
    """Two blocks and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, 3)."""
        for layer in self.layers:
            x = layer(x)
        outputs: Tensor = self.head(x)
        return outputs


class Counting(Block):
    """Counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        self.calls.add_(1)
        return h.tanh()


class Growing(Block):
    """Reads a scale that longer batches make larger for all, as dynamic NTK does."""

    scale = 1.0

    def between(self, h: Tensor) -> Tensor:
        """Return what `down` reads."""
        if len(h) > 3:
            self.scale = 2.0
        return (h * self.scale).tanh()


class Leaking:
    """A region that keeps what it was given."""

    def __init__(self, block: nn.Module) -> None:
        self.forward = block.forward
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Any:
        self.seen.append(x.detach() + 1)
        return checkpoint(self.forward, x, use_reentrant=False)


def leaking(model: Stack) -> None:
    """Checkpoint each block in a region that keeps its inputs."""
    for layer in model.layers:
        layer.forward = Leaking(layer)


def stack_of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a factory of stacks of `block`."""
    return partial(Stack, block)


def checkpointed(**options: Any) -> Callable[[Stack], None]:
    """Return a function that checkpoints each block in place with `options`."""

    def apply(model: Stack) -> None:
        for layer in model.layers:
            region: Any = partial(checkpoint, layer.forward, **{"use_reentrant": False, **options})
            layer.forward = region

    return apply


class Tied(Block):
    """Ends in a weight that the next block casts, too."""

    tied: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (B, D)."""
        outputs: Tensor = x + self.tied(self.up(x).tanh()).sin().float()
        return outputs


def tied() -> nn.Module:
    """Return a stack whose blocks share a weight."""
    model, shared = Stack(Tied), nn.Linear(WIDTH, WIDTH)
    for layer in model.layers:
        layer.tied = shared
    return model


def saving(*operators: Any) -> Callable[[Stack], None]:
    """Return a function that checkpoints each block with torch's own save list of `operators`."""
    return checkpointed(context_fn=partial(create_selective_checkpoint_contexts, list(operators)))


def batch(rows: int = 4, *, requires_grad: bool = False) -> tuple[Tensor]:
    """Return normally distributed inputs."""
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return (values.requires_grad_(requires_grad),)
