"""A flag for checkpointing is set on a model that never reads it."""

from __future__ import annotations

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    vars(model)["gradient_checkpointing"] = True
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="inert",
    evidence=Evidence(parts=()),
    names=("nothing", "inert", "saved"),
    why="The attribute exists on the outer module only; blocks look at their own.",
    fix="Use the model's own method, and check that saved bytes fall.",
)
