"""Autocast around forward, backward outside of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Mixed(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def make() -> nn.Module:
    return Mixed(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=34,
    why="torch.utils.checkpoint recomputes under forward's autocast.",
)
