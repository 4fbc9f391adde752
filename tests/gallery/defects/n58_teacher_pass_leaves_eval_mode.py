"""A teacher's pass at the end of forward leaves the blocks in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Dropped(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * (0.5 if self.training else 1.0)).tanh()


class Distilled(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            target = Blocks.forward(self.eval(), x)
        return (y - target).square()


def make() -> nn.Module:
    return Distilled(Dropped(), Dropped())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.23),
    names=("training", "blocks"),
    why="Recomputation runs in the mode that the module has in backward.",
    fix="Put the mode back before forward returns.",
)
