"""A list of auxiliary losses for the log gets each twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Logging(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        self.logged.append(float(x.square().mean()))
        return y.sin()


def make() -> nn.Module:
    return Blocks(Logging(), Logging())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("state",)),
    names=("logged", "blocks"),
    link="https://github.com/NVIDIA/Megatron-LM/issues/1514",
    why="The region appends to a list, and recomputation appends again.",
    fix="Return the loss from the region and append outside of it.",
)
