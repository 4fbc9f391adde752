"""A saved product is changed in place through a view that counts its own changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear(bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.unsqueeze(0)).mul_(2.0).sin().squeeze(0)


def make() -> nn.Module:
    return Blocks(Product(), Product())


def variant(model: nn.Module) -> nn.Module:
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpointed(model, context_fn=saved)


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=0.86),
    names=("blocks",),
    why="F.linear on three dimensions is mm and _unsafe_view; torch asks the counter of what mm returned.",
    fix="Change out of place, or save nothing that a layer changes.",
)
