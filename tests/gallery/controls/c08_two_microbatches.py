"""Two micro-batches of different sizes in flight, and no state."""

from __future__ import annotations

from torch import nn

from tests.gallery.facts import Control
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

FACTS = Control(like=8, why="Each region keeps its own input.")


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


batch = [rows(6), rows(12)]
variant = checkpointed
