"""A context variable is set around forward only."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

SCALE = ContextVar("scale", default=1.0)


class Scaled(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * SCALE.get()).tanh()


class Contextual(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        token = SCALE.set(3.0)
        y = super().forward(x)
        SCALE.reset(token)
        return y


def make() -> nn.Module:
    return Contextual(Scaled(), Scaled())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=2.0),
    names=("blocks",),
    link="https://github.com/adapter-hub/adapters/issues/732",
    why="Backward runs after the context has ended, so recomputation reads the default.",
    fix="Read the variable before the region and pass its value, or set it with context_fn.",
)
