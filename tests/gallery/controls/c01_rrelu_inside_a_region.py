"""RReLU in the middle of a region."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Noisy(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(self.linear(x), 0.1, 0.9, training=True).sin().tanh()


def make() -> nn.Module:
    return Blocks(Noisy(), Noisy())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=1,
    why="Another saved tensor follows, so recomputation runs RReLU to its end.",
)
