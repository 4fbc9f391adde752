"""An average that regions read is updated before they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import WIDTH, Blocks, Dense, checkpointed, rows

FACTS = Control(like=23, why="Forward and recomputation read the same average.")


class Averaging(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x * self.average)


class Averages(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            block.average = block.average * 0.5 + 0.5 * x.mean(0)
        return super().forward(x)


def make() -> nn.Module:
    return Averages(Averaging(), Averaging())


batch = rows()
variant = checkpointed
