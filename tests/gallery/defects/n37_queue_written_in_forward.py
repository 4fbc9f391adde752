"""A queue of negatives is written in forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed, rows


class Contrasting(Dense):
    end = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        keys, queue = self.linear(x), self.get_buffer("queue")
        negatives = queue.clone()
        queue[self.end % 4] = keys.detach().mean(0)
        self.end += 1
        return (keys @ negatives.T).softmax(-1) @ negatives + keys


def make() -> nn.Module:
    return Blocks(Contrasting())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "buffers", "state"), gradients=0.74),
    names=("queue", "end", "blocks"),
    why="Recomputation reads a queue that already has this step's keys, and writes them again.",
    fix="Write to the queue after backward.",
)
