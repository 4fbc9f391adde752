"""A hook clips the gradient of a weight that two regions share."""

from __future__ import annotations

from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

FACTS = Control(like=57, why="Non-reentrant regions have one backward, so the hook sees the sum.")


def make() -> nn.Module:
    model = Blocks(Dense(), Dense())
    weight = model.blocks[1].linear.weight = model.blocks[0].linear.weight
    weight.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
    return model


batch = rows()
variant = checkpointed
