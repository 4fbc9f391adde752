"""A mask that goes to each region by keyword is changed in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Masked(Dense):
    def forward(self, x: torch.Tensor, mask: Any = None) -> Any:
        return self.linear(x + mask).tanh()


class Sliding(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.ones_like(x)
        for block in self.blocks:
            x = block(x, mask=mask)
            mask.mul_(-1.0)
        return self.squared(x)


def make() -> nn.Module:
    return Sliding(Masked(), Masked(), Masked())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=2.3),
    names=("blocks",),
    why="Tensors given by keyword are held, not saved: their version is never checked.",
    fix="Pass the mask by position, or make a new one for each block.",
)
