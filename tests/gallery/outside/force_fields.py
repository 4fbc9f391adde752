"""Blocks that take the gradient of an energy in their forward, in one region of ac=nested.

Found with a test of torch for nested checkpoints; force fields of molecules are such models.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strategies.ac.nested import Nested
from tests.gallery.outside._gradients import relative_error

BEFORE = "CheckpointError: ac: 'blocks.0' saved more tensors in its recomputation than in forward"
RIGHT = "0"


class Force(nn.Module):
    """The gradient of an energy by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return forces of the shape of `x`."""
        energy = self.layer(x).tanh().square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class Model(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Force(), Force()])

    def forward(self, x: Tensor) -> Tensor:
        """Return what the second block makes."""
        forces: Tensor = self.blocks[1](self.blocks[0](x))
        return forces


def answer() -> str:
    """Return the relative error of the worst gradient, or what is raised."""
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    return relative_error(Model(), (x,), Nested(layers_fqn="blocks", levels=[1]).apply)
