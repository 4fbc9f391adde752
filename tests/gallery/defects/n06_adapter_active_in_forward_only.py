"""The active adapter is switched back before backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.active = linear(), linear(), "first"

    def forward(self, x: torch.Tensor) -> Any:
        return self.get_submodule(self.active)(x).tanh()


class Switching(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        self.blocks[0].active = "second"
        y = super().forward(x)
        self.blocks[0].active = "first"
        return y


def make() -> nn.Module:
    return Switching(Adapted())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=0.44),
    names=("active", "second", "first"),
    link="https://github.com/huggingface/peft/issues/2832",
    why="Recomputation runs the adapter that is active in backward, and gradients are made of its values.",
    fix="Switch inside of the region, or switch back after backward.",
)
