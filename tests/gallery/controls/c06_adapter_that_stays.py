"""The active adapter is chosen once and stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.active = linear(), linear(), "second"

    def forward(self, x: torch.Tensor) -> Any:
        return self.get_submodule(self.active)(x).sin().tanh()


def make() -> nn.Module:
    return Blocks(Adapted(), Adapted())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=6,
    why="Forward and recomputation find the same adapter.",
)
