"""An observer of fake quantisation sees every batch twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Observed(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        largest = self.get_buffer("largest")
        largest.lerp_(x.detach().abs().max(), 0.3)
        step = float(largest) / 7
        return self.linear(torch.fake_quantize_per_tensor_affine(x, step, 0, -8, 7)).tanh()


def make() -> nn.Module:
    return Blocks(Observed(), Observed())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "buffers"), gradients=0.77),
    names=("low", "blocks"),
    why="Its moving range is a buffer that forward updates before it quantises.",
    fix="Freeze observers, or put their buffers back for recomputation.",
)
