"""A hook clips the gradient of a weight that two regions share."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    model = Blocks(Dense(), Dense())
    weight = model.blocks[1].linear.weight = model.blocks[0].linear.weight
    weight.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=57,
    why="Non-reentrant regions have one backward, so the hook sees the sum.",
)
