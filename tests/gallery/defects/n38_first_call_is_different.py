"""The first call of a block takes a path of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

FACTS = Defect(
    gradients=0.55,
    names=("ready", "blocks"),
    cause="The first call initialises and does not scale; its recomputation is a second call.",
    fix="Initialise before training, outside of the region.",
)


class Lazy(Dense):
    ready = False

    def forward(self, x: torch.Tensor) -> Any:
        factor, self.ready = 3.0 if self.ready else 1.0, True
        return (self.linear(x) * factor).tanh()


def make() -> nn.Module:
    return Blocks(Lazy())


batch = rows()
variant = checkpointed
