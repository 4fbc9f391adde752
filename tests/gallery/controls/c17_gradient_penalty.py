"""A gradient penalty, which differentiates through the regions twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Longer(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).sin().tanh()


class Penalised(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        place = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(place).sum(), place, create_graph=True)
        return super().forward(x).mean() + 0.01 * (slope.square().sum(1) - 1).square()


def make() -> nn.Module:
    return Penalised(Longer(), Longer())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=0,
    why="Non-reentrant regions can be differentiated again.",
)
