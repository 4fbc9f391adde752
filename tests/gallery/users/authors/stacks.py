"""Three blocks between two linears: where a module of the audit puts the block that it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

WIDTH = 8
ROWS = 4

Example: TypeAlias = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]
Factory: TypeAlias = Callable[[], nn.Module]


class Plain(nn.Module):
    """A linear and tanh on (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return self.linear(x).tanh()


class Stack(nn.Module):
    """Embedding, blocks one after the other, head."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def example(model: nn.Module) -> Example:
    """Return `model`, a batch of (B, D) and a loss."""
    return model, (torch.randn(ROWS, WIDTH),), lambda outputs: outputs.square().mean()


def around(middle: Factory) -> Example:
    """Return a stack with `middle()` between two plain blocks."""
    return example(Stack([Plain(), middle(), Plain()]))
