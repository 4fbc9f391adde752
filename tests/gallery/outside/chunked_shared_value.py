"""A loop that sets a value for each block on an object that all share, in chunks: what a plan says or gives.

Found by an audit: every block ran with the value of the last one.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.gallery.outside._chunks import said_or_error

BEFORE = "wrong outputs"
RIGHT = "refused: result 0, of layers.2,"


class Block(nn.Module):
    """A branch, as large as the shared object says."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.a, self.b, self.config = nn.Linear(16, 64), nn.Linear(64, 16), config

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        made: Tensor = x + self.config.scale * self.b(torch.tanh(self.a(x)))
        return made


class Net(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=3.0)
        self.layers = nn.ModuleList(Block(self.config) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        for number, layer in enumerate(self.layers, 1):
            self.config.scale = float(number)
            x = layer(x)
        return x


def answer() -> str:
    """Return what the plan is refused for, or how its results are."""
    return said_or_error(Net)
