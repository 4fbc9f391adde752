"""A bias that routes is updated before the regions run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows

FACTS = Control(like=13, why="Forward and recomputation route by the same bias.")


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.get_buffer("bias")).argmax(1)
        y = torch.bmm(x.unsqueeze(1), self.experts[chosen]).squeeze(1) * scores.gather(1, chosen[:, None])
        return y.sin(), torch.bincount(chosen, minlength=4)


class Balancing(Blocks):
    pending: Any = 6

    def forward(self, x: torch.Tensor) -> Any:
        self.blocks[0].bias.add_(0.3 * torch.as_tensor(len(x) / 4 - self.pending).sign())
        y, self.pending = self.blocks[0](x)
        return self.squared(y)


def make() -> nn.Module:
    return Balancing(Balanced())


batch = rows(24)
variant = checkpointed
