"""Checkpointing hides the error of an in-place operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class InPlace(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x).exp()
        y.mul_(2.0)
        return y.sin()


def make() -> nn.Module:
    return Blocks(InPlace())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("hides_error",)),
    names=("Exp",),
    why="exp saves its output and mul_ changes it; recomputation records the changed tensor as a new one.",
    fix="Write y = y * 2: without checkpointing autograd refuses the program.",
)
