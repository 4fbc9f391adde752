"""A module's global switch is on during forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

SWITCHES = {"gain": 1.0}


class Gained(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * SWITCHES["gain"]).tanh()


class Switched(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        SWITCHES["gain"] = 4.0
        y = super().forward(x)
        SWITCHES["gain"] = 1.0
        return y


def make() -> nn.Module:
    return Switched(Gained(), Gained())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=3.2),
    names=("blocks",),
    why="Recomputation sees the switch as it is in backward.",
    fix="Pass the switch as an argument, or set it with context_fn.",
)
