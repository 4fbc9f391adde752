"""Full checkpointing by this package."""

from __future__ import annotations

from torch import nn

from strategies.ac.full import Full
from tests.gallery.facts import Control
from tests.gallery.parts import Blocks, Dense, rows

FACTS = Control(like=0, why="It is the plain case.")


def make() -> nn.Module:
    return Blocks(*(nn.Sequential(Dense(), nn.Dropout(0.1)) for _ in range(3)))


batch = rows()
variant = Full(layers_fqn="blocks")
