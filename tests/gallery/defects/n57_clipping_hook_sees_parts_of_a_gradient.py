"""A hook clips the gradient of a weight that two reentrant regions share."""

from __future__ import annotations

from functools import partial

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Dense, Rooted, checkpointed, rows


def make() -> nn.Module:
    model = Rooted(Dense(), Dense())
    weight = model.blocks[1].linear.weight = model.blocks[0].linear.weight
    weight.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    verdict="differs",
    evidence=Evidence(gradients=0.59),
    names=("weight", "shared", "blocks"),
    link="https://github.com/pytorch/pytorch/issues/81296",
    why="Each region's backward calls the hook with its own part, which is clipped before parts add up.",
    fix="Use use_reentrant=False, or clip after backward.",
)
