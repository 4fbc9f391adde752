"""A region seeds torch's generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Seeded(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return super().forward(functional.dropout(x, 0.5))


def make() -> nn.Module:
    return Blocks(Seeded(), Seeded())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=11,
    why="Recomputation seeds again, and the generator is put back after it.",
)
