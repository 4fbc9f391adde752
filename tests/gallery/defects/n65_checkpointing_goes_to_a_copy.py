"""Checkpointing goes to a copy of the model, and the original trains."""

from __future__ import annotations

from copy import deepcopy

from torch import nn

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, Dense, checkpointed, rows

FACTS = Defect(
    parts=(),
    verdict="inert",
    names=("nothing", "inert", "saved"),
    cause="The function returns what it was given instead of what it made.",
    fix="Use what the function makes, and check that saved bytes fall.",
)


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    checkpointed(deepcopy(model))
    return model


batch = rows()
