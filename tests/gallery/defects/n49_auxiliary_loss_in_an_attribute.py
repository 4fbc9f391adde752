"""A block leaves its auxiliary loss in an attribute, under reentrant checkpointing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Gated(Dense):
    extra: Any = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        self.extra = y.softmax(-1).mean(0).square().sum()
        return y.tanh()


class Summing(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x.sin().requires_grad_())
        return y.mean() + 5 * sum(block.extra for block in self.blocks)


def make() -> nn.Module:
    return Summing(Gated(), Gated())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    verdict="differs",
    evidence=Evidence(gradients=0.73),
    names=("blocks",),
    why="A reentrant forward has no graph, so the attribute is a constant without gradient.",
    fix="Return the loss from the region, or use use_reentrant=False.",
)
