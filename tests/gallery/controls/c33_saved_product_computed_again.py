"""A saved product is changed in place through a view, and the save list is this package's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from strategies.ac.selective_op import SelectiveOp
from tests.gallery.case import Case
from tests.gallery.parts import Blocks, linear, rows


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.unsqueeze(0)).mul_(2.0).sin().squeeze(0)


def make() -> nn.Module:
    return Blocks(Product(), Product())


CASE = Case(
    make=make,
    batch=rows(),
    variant=SelectiveOp(layers_fqn="blocks", save_ops=("aten.mm.default", "aten.sin.default")),
    like=67,
    why="It asks for writes to the storage, and computes again what is written.",
)
