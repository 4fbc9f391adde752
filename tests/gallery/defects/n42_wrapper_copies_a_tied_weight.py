"""A wrapper copies the block, and its tied weight is tied no more."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    model = Blocks(Dense(), Dense())
    model.blocks[0].linear.weight = model.head.weight
    return model


def variant(model: nn.Module) -> nn.Module:
    blocks: Any = model.get_submodule("blocks")
    blocks[0] = deepcopy(blocks[0])
    return checkpointed(model)


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=0.84),
    names=("weight", "head", "blocks"),
    why="deepcopy of one block makes a second parameter; head and block each get a part of the gradient.",
    fix="Wrap the block itself.",
)
