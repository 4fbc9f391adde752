"""Dropout with torch's defaults."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, checkpointed, linear, rows


def make() -> nn.Module:
    return Blocks(*(nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)))


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=11,
    why="The RNG state is saved with the region's input.",
)
