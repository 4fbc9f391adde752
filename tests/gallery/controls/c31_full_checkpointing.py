"""Full checkpointing by this package."""

from __future__ import annotations

from torch import nn

from strategies.ac.full import Full
from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, rows


def make() -> nn.Module:
    return Blocks(*(nn.Sequential(Dense(), nn.Dropout(0.1)) for _ in range(3)))


CASE = Case(
    make=make,
    batch=rows(),
    variant=Full(layers_fqn="blocks"),
    like=0,
    why="It is the plain case.",
)
