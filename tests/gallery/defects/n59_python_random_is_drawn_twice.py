"""Recomputation draws from Python's random once more."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

FACTS = Defect(
    names=("python",),
    parts=("rng_state",),
    cause="A factor that only scales has right gradients, but the next step draws another one.",
    fix="Draw before the region and pass the number to it.",
)


class Deep(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return x + random.random() * super().forward(x)


def make() -> nn.Module:
    return Blocks(Deep(), Deep())


batch = rows()
variant = checkpointed
