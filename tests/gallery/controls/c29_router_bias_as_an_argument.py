"""A bias that routes is updated in forward, and a copy goes to the region as an argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor, bias: Any = 0.0) -> Any:
        scores = self.gate(x).sigmoid()
        chosen = (scores + bias).topk(1).indices
        y = torch.bmm(x.unsqueeze(1), self.experts[chosen[:, 0]]).squeeze(1) * scores.gather(1, chosen)
        return y.sin()


class Balancing(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        bias = self.blocks[0].bias
        y = self.blocks[0](x, bias.clone())
        bias[0] += 0.5 if len(x) > 16 else -0.5
        return self.squared(y)


def make() -> nn.Module:
    return Balancing(Balanced())


CASE = Case(
    make=make,
    batch=[rows(12), rows(24)],
    variant=checkpointed,
    like=13,
    why="Forward and recomputation route by the same bias, whatever is in flight.",
)
