"""A region puts a number back at its end, and runs to its end."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Scoped(Dense):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> Any:
        self.scale *= 2.0
        y = (super().forward(x) * self.scale).tanh()
        self.scale /= 2.0
        return y


def make() -> nn.Module:
    return Blocks(Scoped(), Scoped())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, early_stop=False),
    like=10,
    why="early_stop=False: recomputation runs the tail, too.",
)
