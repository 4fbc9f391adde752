"""A longer micro-batch changes what the shorter one's recomputation reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Stretching(Dense):
    base = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) > 8:
            self.base = 2.0
        return (self.linear(x) * self.base).tanh()


def make() -> nn.Module:
    return Blocks(Stretching(), Stretching())


CASE = Case(
    make=make,
    batch=[rows(6), rows(12)],
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.074),
    names=("base", "blocks"),
    why="Two micro-batches are in flight, and the base that the second one grows is the first one's, too.",
    fix="Compute the base from the input of the region, and keep nothing on the module.",
)
