"""The optimizer steps in backward, on a weight of two reentrant regions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Dense, Rooted, checkpointed, rows


def step(weight: Any) -> None:
    with torch.no_grad():
        weight.sub_(0.5 * weight.grad.sign())


def make() -> nn.Module:
    model = Rooted(Dense(), Dense())
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    model.blocks[0].linear.weight.register_post_accumulate_grad_hook(step)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    verdict="differs",
    evidence=Evidence(gradients=0.4),
    names=("weight", "shared", "blocks"),
    link="https://github.com/pytorch/pytorch/issues/81296",
    why="Each reentrant region has a backward of its own, so the hook fires with a part of the gradient.",
    fix="Use use_reentrant=False.",
)
