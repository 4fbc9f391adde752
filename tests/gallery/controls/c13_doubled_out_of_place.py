"""The program of defect 21, out of place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class OutOfPlace(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x).exp()
        return (y * 2.0).sin()


def make() -> nn.Module:
    return Blocks(OutOfPlace(), OutOfPlace())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=21,
    why="Nothing that is saved changes.",
)
