"""A product that ac=selective_op keeps is written in place, behind a layer without a bias and in a GRU.

torch's own selective checkpoint has the same errors (gallery 67).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies.ac.selective_op import SelectiveOp
from tests.gallery.outside._gradients import Model, relative_error

BEFORE = "linear 1.6, GRU 0.27"
RIGHT = "linear 0, GRU 0"


class Scaled(nn.Module):
    """A product of three dimensions, written in place, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        y: Tensor = self.second(torch.tanh(self.first(x).mul_(3).sin()))
        return y


class Recurrent(nn.Module):
    """A GRU and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        y: Tensor = x + self.layer(x)[0]
        return y


def answer() -> str:
    """Return the relative errors of the worst gradients."""
    x, kept = (
        torch.sin(torch.arange(90.0)).view(3, 5, 6),
        SelectiveOp(layers_fqn="blocks", save_ops=("matmul",)),
    )
    linear, gru = (relative_error(Model(block), (x,), kept.apply) for block in (Scaled, Recurrent))
    return f"linear {linear}, GRU {gru}"
