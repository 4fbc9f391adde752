"""A reentrant region returns its auxiliary loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Gated(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x).sin()
        return y.tanh(), y.softmax(-1).mean(0).square().sum()


class Summing(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        x, extra = x.sin().requires_grad_(), x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            extra = extra + more
        return self.squared(x).mean() + 5 * extra


def make() -> nn.Module:
    return Summing(Gated(), Gated())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    like=49,
    why="What a region returns is part of the graph.",
)
