"""An average that a region reads is updated in place before backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed, rows


class Averaging(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * self.average).tanh()


class Averages(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        self.blocks[0].average.mul_(0.5)
        return y


def make() -> nn.Module:
    return Averages(Averaging())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("hides_error",)),
    names=("average", "blocks"),
    why="Recomputation reads the average of the next step; without checkpointing autograd refuses.",
    fix="Update the average after backward, or out of place.",
)
