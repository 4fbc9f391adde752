"""Recomputation draws numbers that no gradient needs, and the next step draws others."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Noisy(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        noise = 0.1 * torch.randn(x.shape)
        return super().forward(x) + noise


def make() -> nn.Module:
    return Blocks(Noisy(), Noisy())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, preserve_rng_state=False),
    verdict="differs",
    evidence=Evidence(parts=("rng_state",)),
    names=("blocks",),
    why="preserve_rng_state=False: noise that is only added has right gradients, but is drawn twice.",
    fix="Use preserve_rng_state=True wherever a region draws.",
)
