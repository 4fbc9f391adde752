"""A region ends in RReLU, whose noise is saved before it is drawn."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, checkpointed, linear, rows

FACTS = Defect(
    gradients=None,
    link="https://github.com/pytorch/pytorch/issues/193671",
    cause="RReLU saves its noise before the kernel fills it, and recomputation stops at that moment.",
    fix="End the region with another operator, or use early_stop=False.",
)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(self.linear(x), 0.1, 0.9, training=True)


def make() -> nn.Module:
    return Blocks(Noisy(), Noisy())


batch = rows()
variant = checkpointed
