"""Early stop skips the end of a region, which puts a number back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Scoped(Dense):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        self.scale *= 2.0
        y = (self.linear(x) * self.scale).tanh()
        self.scale /= 2.0
        return y


def make() -> nn.Module:
    return Blocks(Scoped())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("state",)),
    names=("scale", "blocks"),
    link="https://github.com/pytorch/torchtitan/issues/1467",
    why="Recomputation ends once the last saved tensor is there, so code behind it does not run.",
    fix="Change nothing on the module in a region, or checkpoint with early_stop=False.",
)
