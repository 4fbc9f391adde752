"""A counter of calls chooses the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList((linear(), linear(), linear())), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.layers[self.calls % 3](x).tanh()


def make() -> nn.Module:
    return Blocks(Alternating())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "state"), gradients=0.27),
    names=("calls", "blocks"),
    why="Recomputation is a call, so it takes the next layer.",
    fix="Pass the index of the layer to the region.",
)
