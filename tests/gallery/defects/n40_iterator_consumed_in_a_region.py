"""A region takes the next number of an iterator."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Scheduled(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = cycle((0.5, 2.0, 4.0))

    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * next(self.schedule)).tanh()


def make() -> nn.Module:
    return Blocks(Scheduled())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.59),
    names=("schedule", "blocks"),
    why="Recomputation takes the number after it.",
    fix="Take the number before the region and pass it.",
)
