"""A save list that names what runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from strategies.ac.selective_op import SelectiveOp
from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, rows


class Longer(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).sin().tanh()


def make() -> nn.Module:
    return Blocks(Longer(), Longer())


CASE = Case(
    make=make,
    batch=rows(),
    variant=SelectiveOp(layers_fqn="blocks", save_ops=("matmul",)),
    like=31,
    why="The group matmul has addmm.",
)
