"""A gradient penalty, which differentiates through the regions twice."""

from __future__ import annotations

import torch
from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

FACTS = Control(like=0, why="Non-reentrant regions can be differentiated again.")


class Penalised(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return 0.01 * (slope.square().sum(1) - 1).square()


def make() -> nn.Module:
    return Penalised(Dense(), Dense())


batch = rows()
variant = checkpointed
