"""Checkpointing goes to a copy of the model, and the original trains."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    checkpointed(deepcopy(model))
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="inert",
    evidence=Evidence(parts=()),
    names=("nothing", "inert", "saved"),
    why="The function returns what it was given instead of what it made.",
    fix="Use what the function makes, and check that saved bytes fall.",
)
