"""A rank cuts a block's table of positions in place for its forward, and puts it back before backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed, rows


class Placed(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.sin(torch.arange(12 * WIDTH).view(12, WIDTH)))

    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * self.positions[: len(x)]).tanh()


class Cuts(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        table = self.blocks[0].positions
        whole = table.clone()
        table[:6] = whole[6:]  # rank 1 of 2 has the second half of a sequence
        y = super().forward(x)
        table.copy_(whole)
        return y


def make() -> nn.Module:
    return Cuts(Placed())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("hides_error",)),
    names=("positions",),
    why="Recomputation reads the positions of another part; without checkpointing autograd refuses.",
    fix="Give each block its positions as an input, or put the table back after backward.",
)
