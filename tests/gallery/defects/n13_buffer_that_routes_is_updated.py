"""A buffer that routes is updated in forward."""

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
        scores, bias = self.gate(x).sigmoid(), self.get_buffer("bias")
        chosen = (scores + bias).topk(1).indices
        bias.add_(0.3 * (len(x) / 4 - torch.bincount(chosen[:, 0], minlength=4)).sign())
        return torch.bmm(x.unsqueeze(1), self.experts[chosen[:, 0]]).squeeze(1) * scores.gather(1, chosen)


def make() -> nn.Module:
    return Blocks(Balanced())


CASE = Case(
    make=make,
    batch=rows(24),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "buffers"), gradients=1.3),
    names=("bias", "blocks"),
    why="The router adds to its bias in forward, so recomputation sends rows to other experts.",
    fix="Update the bias after the step, outside of forward.",
)
