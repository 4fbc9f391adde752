"""A context variable is read before the region."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

SCALE = ContextVar("scale", default=1.0)


class Scaled(Dense):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return super().forward(x * scale)


class Contextual(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        token = SCALE.set(3.0)
        for block in self.blocks:
            x = block(x, SCALE.get())
        SCALE.reset(token)
        return self.squared(x)


def make() -> nn.Module:
    return Contextual(Scaled(), Scaled())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=5,
    why="The region gets its value as an argument.",
)
