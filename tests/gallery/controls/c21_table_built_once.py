"""A region builds a table when it first needs one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Tabled(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x)).sin().unsqueeze(1)
        return super().forward(x * self.tables[len(x)])


def make() -> nn.Module:
    return Blocks(Tabled(), Tabled())


CASE = Case(
    make=make,
    batch=[rows(6), rows(12)],
    variant=checkpointed,
    like=8,
    why="The table follows from the number of rows only.",
)
