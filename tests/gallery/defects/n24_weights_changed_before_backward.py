"""Weights are normalised in place between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Normalising(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        with torch.no_grad():
            for block in self.blocks:
                block.linear.weight.div_(block.linear.weight.norm())
        return y


def make() -> nn.Module:
    return Normalising(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("hides_error",)),
    names=("weight", "blocks"),
    why="Recomputation uses the new weights; without checkpointing autograd refuses.",
    fix="Change weights after backward only.",
)
