"""A codebook moves towards the rows in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed, rows


class Quantised(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        codebook = self.get_buffer("codebook")
        nearest = codebook[torch.cdist(x.detach(), codebook).argmin(1)]
        codebook.lerp_(x.detach()[:4], 0.5)
        return self.linear(x + (nearest - x).detach()).tanh()


def make() -> nn.Module:
    return Blocks(Quantised())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "buffers"), gradients=0.7),
    names=("codebook", "blocks"),
    why="Recomputation looks rows up in the moved codebook, and moves it again.",
    fix="Move the codebook after backward, or keep it out of the region.",
)
