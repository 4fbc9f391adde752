"""Python's random numbers choose before the region."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Coin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.tails = linear(), linear()

    def forward(self, x: torch.Tensor, heads: bool = False) -> Any:
        return (self.heads if heads else self.tails)(x).sin().tanh()


class Tossed(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x, random.random() < 0.5)
        return self.squared(x)


def make() -> nn.Module:
    return Tossed(Coin(), Coin(), Coin())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=3,
    why="The region gets the choice as an argument.",
)
