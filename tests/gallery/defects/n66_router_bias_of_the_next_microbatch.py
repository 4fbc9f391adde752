"""A bias that routes is updated before the blocks, which is right until two micro-batches are in flight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.get_buffer("bias")).topk(1).indices
        return torch.bmm(x.unsqueeze(1), self.experts[chosen[:, 0]]).squeeze(1) * scores.gather(1, chosen)


class Balancing(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        self.blocks[0].bias[0] += 0.5 if len(x) > 16 else -0.5
        return super().forward(x)


def make() -> nn.Module:
    return Balancing(Balanced())


CASE = Case(
    make=make,
    batch=[rows(12), rows(24)],
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.37),
    names=("bias", "blocks"),
    why="The second micro-batch moves the bias before the first has recomputed its choice of experts.",
    fix="Pass a copy of the bias to the region, or update it once a step.",
)
