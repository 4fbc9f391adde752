"""The load of experts is counted twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, checkpointed, rows


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        chosen = scores.topk(1).indices
        self.get_buffer("load").add_(torch.bincount(chosen[:, 0], minlength=4))
        return x * scores.gather(1, chosen).cos()


def make() -> nn.Module:
    return Blocks(Counted(), Counted())


CASE = Case(
    make=make,
    batch=rows(24),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("buffers",)),
    names=("load", "blocks"),
    link="https://github.com/NVIDIA-NeMo/Automodel/pull/3247",
    why="The counter is a buffer that forward adds to, and recomputation is a forward.",
    fix="Count in a forward hook of the checkpointed module, or put the buffer back.",
)
