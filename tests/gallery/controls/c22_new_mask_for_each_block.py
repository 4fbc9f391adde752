"""Each block gets a mask of its own, by keyword."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Masked(Dense):
    def forward(self, x: torch.Tensor, mask: Any = None) -> Any:
        return super().forward(x + mask)


class Sliding(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.ones_like(x)
        for block in self.blocks:
            x, mask = block(x, mask=mask), -mask
        return self.squared(x)


def make() -> nn.Module:
    return Sliding(Masked(), Masked(), Masked())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=44,
    why="No mask changes after its region has run.",
)
