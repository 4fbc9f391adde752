"""A block asks whether gradients are on, and a reentrant forward says no."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Dense, Rooted, checkpointed, rows


class Fast(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return super().forward(x)
        return super().forward(x).bfloat16().to(x.dtype)


def make() -> nn.Module:
    return Rooted(Fast(), Fast())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    verdict="differs",
    evidence=Evidence(parts=("loss", "gradients"), gradients=0.0045),
    names=("output",),
    why="Reentrant checkpointing runs forward under no_grad, so the block takes its path for inference.",
    fix="Use use_reentrant=False, or ask self.training.",
)
