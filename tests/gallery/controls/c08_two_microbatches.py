"""Two micro-batches of different sizes in flight, and no state."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


CASE = Case(
    make=make,
    batch=[rows(6), rows(12)],
    variant=checkpointed,
    like=8,
    why="Each region keeps its own input.",
)
