"""A region ends in RReLU, whose noise is saved before it is drawn."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(self.linear(x), 0.1, 0.9, training=True)


def make() -> nn.Module:
    return Blocks(Noisy(), Noisy())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=None),
    names=("blocks",),
    link="https://github.com/pytorch/pytorch/issues/193671",
    why="RReLU saves its noise before the kernel fills it, and recomputation stops at that moment.",
    fix="End the region with another operator, or use early_stop=False.",
)
