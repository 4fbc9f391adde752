"""Recomputation draws from Python's random once more."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Deep(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return x + random.random() * super().forward(x)


def make() -> nn.Module:
    return Blocks(Deep(), Deep())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("rng_state",)),
    names=("python",),
    why="A factor that only scales has right gradients, but the next step draws another one.",
    fix="Draw before the region and pass the number to it.",
)
