"""The first call of a block takes a path of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Lazy(Dense):
    ready = False

    def forward(self, x: torch.Tensor) -> Any:
        factor, self.ready = 3.0 if self.ready else 1.0, True
        return (self.linear(x) * factor).tanh()


def make() -> nn.Module:
    return Blocks(Lazy())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.55),
    names=("ready", "blocks"),
    why="The first call initialises and does not scale; its recomputation is a second call.",
    fix="Initialise before training, outside of the region.",
)
