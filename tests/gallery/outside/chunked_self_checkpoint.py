"""A block that checkpoints itself, in chunks: what a plan for 60 % of its bytes says or gives.

Found by an audit: the loss was right, and the gradients of the plan's program were those of memory
that nobody had written to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.outside._chunks import said_or_error

BEFORE = "wrong gradients"
RIGHT = "refused: the gradient of 'a.weight', which aten.t.default of 'a' reads,"


class Net(nn.Module):
    """Two linears in a checkpoint of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def inner(self, x: Tensor) -> Tensor:
        """Return what the checkpoint runs."""
        made: Tensor = self.b(torch.tanh(self.a(x)))
        return made

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        made: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return made


def answer() -> str:
    """Return what the plan is refused for, or how its gradients are."""
    return said_or_error(Net)
