"""A temperature is annealed at the end of forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Tempered(Dense):
    temperature = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) / self.temperature).tanh()


class Annealed(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        for block in self.blocks:
            block.temperature *= 0.5
        return y


def make() -> nn.Module:
    return Annealed(Tempered(), Tempered())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.65),
    names=("temperature", "blocks"),
    why="Recomputation reads the temperature of the next step.",
    fix="Anneal after backward, or pass the temperature to the region.",
)
