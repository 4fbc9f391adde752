"""The optimizer steps in backward, on weights of one region each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def step(weight: Any) -> None:
    with torch.no_grad():
        weight.sub_(0.5 * weight.grad.sign())


def make() -> nn.Module:
    model = Blocks(Dense(), Dense())
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(step)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=56,
    why="A region's weights step after its recomputation.",
)
