"""A teacher's pass in eval mode, after which forward goes back to train mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Distilled(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            target = Blocks.forward(self.eval(), x)
        self.train()
        return (y - target).square()


def make() -> nn.Module:
    return Distilled(*(nn.Sequential(Dense(), nn.Dropout(0.5)) for _ in range(2)))


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=58,
    why="Recomputation finds the mode of forward.",
)
