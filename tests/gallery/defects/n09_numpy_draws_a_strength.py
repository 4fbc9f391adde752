"""NumPy draws the strength of an augmentation in a region."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Augmented(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * float(np.random.rand()) * 3).tanh()  # noqa: NPY002


def make() -> nn.Module:
    return Blocks(Augmented(), Augmented())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=1.1),
    names=("blocks",),
    why="torch.utils.checkpoint puts back torch's generators, not NumPy's.",
    fix="Draw with torch, or draw before the region and pass the number to it.",
)
