"""LoRA adapters behind a frozen embedding, non-reentrant."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed


class LowRank(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) + self.up(self.down(x))


class Embedded(Blocks):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.embedding = nn.Embedding(16, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.embedding(x))


def make() -> nn.Module:
    return Embedded(LowRank(), LowRank())


CASE = Case(
    make=make,
    batch=(torch.arange(12).view(3, 4),),
    variant=checkpointed,
    like=48,
    why="Regions are connected by their outputs, which require gradients.",
)
