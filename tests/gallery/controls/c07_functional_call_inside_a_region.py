"""torch.func.functional_call inside of the region."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, rows


class Stateless(Blocks):
    run: Any = staticmethod(functional_call)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            scaled = {name: 1.7 * each for name, each in block.named_parameters()}
            x = self.run(block, scaled, (x,))
        return self.squared(x)


def make() -> nn.Module:
    return Stateless(Dense(), Dense())


def variant(model: Any) -> Any:
    model.run = partial(checkpoint, functional_call, use_reentrant=False)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    like=7,
    why="Recomputation swaps the same weights in again.",
)
