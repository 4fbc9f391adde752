"""A mask from a generator that the region makes of a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Masked(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        generator = torch.Generator().manual_seed(1)
        return (super().forward(x) * (torch.rand(x.shape, generator=generator) > 0.5)).tanh()


def make() -> nn.Module:
    return Blocks(Masked(), Masked())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=4,
    why="Every call makes the generator anew, so recomputation draws the same mask.",
)
