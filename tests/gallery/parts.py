"""What entries share: a stack of blocks, inputs, and the usual way to checkpoint a user's blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


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


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    """Let every block run under `torch.utils.checkpoint`, non-reentrant unless `options` say otherwise."""
    for block in model.get_submodule("blocks").children():
        block.forward = partial(checkpoint, block.forward, **{"use_reentrant": False, **options})
    return model
