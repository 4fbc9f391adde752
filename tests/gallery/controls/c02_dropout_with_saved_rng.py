"""Dropout with torch's defaults."""

from __future__ import annotations

from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import Blocks, checkpointed, linear, rows

FACTS = Control(like=11, why="The RNG state is saved with the region's input.")


def make() -> nn.Module:
    return Blocks(*(nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)))


batch = rows()
variant = checkpointed
