"""A router's jitter is drawn anew where two experts are nearly tied."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows


class Jittered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        nn.init.constant_(self.gate.weight, 0.1)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.gate(x).sigmoid()
        chosen = (scores + 1e-6 * torch.rand(scores.shape)).argmax(1)
        return torch.bmm(x.unsqueeze(1), self.experts[chosen]).squeeze(1) * scores.gather(1, chosen[:, None])


def make() -> nn.Module:
    return Blocks(Jittered())


CASE = Case(
    make=make,
    batch=rows(16),
    variant=partial(checkpointed, preserve_rng_state=False),
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=0.81),
    names=("blocks",),
    link="https://github.com/NVIDIA-NeMo/Automodel/pull/2635",
    why="preserve_rng_state=False: a millionth of noise sends rows to other experts.",
    fix="Save the router's choice, or use preserve_rng_state=True.",
)
