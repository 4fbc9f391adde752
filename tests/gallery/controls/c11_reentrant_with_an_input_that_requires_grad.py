"""Reentrant regions, the first with an input that requires a gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Rooted(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.sin().requires_grad_())


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    like=18,
    why="Autograd enters every region by its input.",
)
