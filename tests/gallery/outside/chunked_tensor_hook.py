"""A hook that forward puts on a tensor inside, in chunks: what a plan for 60 % of its bytes says or gives.

Found by an audit: the program has no hook, so that the gradient that it should turn around was not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.gallery.outside._chunks import said_or_error

BEFORE = "wrong gradients"
RIGHT = "refused: the gradient of 'a.weight', which aten.t.default of 'a' reads,"


class Net(nn.Module):
    """Two linears; the gradient between them is turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(torch.neg)
        made: Tensor = self.b(h)
        return made


def answer() -> str:
    """Return what the plan is refused for, or how its gradients are."""
    return said_or_error(Net)
