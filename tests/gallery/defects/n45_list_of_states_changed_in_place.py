"""States go to a region in a list and are changed in place after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Stateful(Dense):
    def forward(self, x: torch.Tensor, states: Any = ()) -> Any:
        return self.linear(x + states[0]).tanh()


class Carrying(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        states = [torch.zeros_like(x)]
        for block in self.blocks:
            x = block(x, states)
            states[0].add_(x.detach())
        return self.squared(x)


def make() -> nn.Module:
    return Carrying(Stateful(), Stateful())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=2.6),
    names=("blocks",),
    why="checkpoint saves tensors that are arguments, and holds those in a list as they are.",
    fix="Pass the tensors themselves, or change copies.",
)
