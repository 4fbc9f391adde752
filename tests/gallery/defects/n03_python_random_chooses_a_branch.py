"""Python's random numbers choose the branch that a region takes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Coin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.tails = linear(), linear()

    def forward(self, x: torch.Tensor) -> Any:
        return (self.heads if random.random() < 0.5 else self.tails)(x).tanh()


def make() -> nn.Module:
    return Blocks(Coin(), Coin(), Coin())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=1.7),
    names=("blocks",),
    why="torch.utils.checkpoint puts back torch's generators, not those of Python's random.",
    fix="Draw before the region and pass the choice to it.",
)
