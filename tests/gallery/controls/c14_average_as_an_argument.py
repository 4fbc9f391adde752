"""An average that changes in forward goes to each region as an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed, rows


class Averaging(Dense):
    def forward(self, x: torch.Tensor, average: Any = 1.0) -> Any:
        return super().forward(x * average)


class Averages(Blocks):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.average = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        self.average = self.average * 0.5 + 0.5 * x.mean(0)
        for block in self.blocks:
            x = block(x, self.average)
        return self.squared(x)


def make() -> nn.Module:
    return Averages(Averaging(), Averaging())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=23,
    why="Each region keeps the average that it was given.",
)
