"""A norm's output is discarded by name, and what was written into it is made again too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from strategies.ac.modules import Modules
from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, linear, rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), linear()

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.norm(x).mul_(0.5)).sin()


def make() -> nn.Module:
    return Blocks(Block(), Block())


CASE = Case(
    make=make,
    batch=rows(),
    variant=Modules(layers_fqn="blocks", discard=("norm",)),
    like=68,
    why="Writes to a storage are operators of its history, and run again with the norm.",
)
