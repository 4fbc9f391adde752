"""Regions within regions."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    return Blocks(Blocks(Dense(), Dense()), Blocks(Dense(), Dense()))


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        checkpointed(block)
    return checkpointed(model)


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    like=0,
    why="What is recomputed twice is the same twice.",
)
