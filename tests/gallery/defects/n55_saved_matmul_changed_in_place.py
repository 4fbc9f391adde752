"""Selective checkpointing is told to allow changes to what it saves."""

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
        return self.linear(x).mul_(2.0).sin()


def make() -> nn.Module:
    return Blocks(Product(), Product())


def variant(model: nn.Module) -> nn.Module:
    saved = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default], allow_cache_entry_mutation=True
    )
    return checkpointed(model, context_fn=saved)


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=0.86),
    names=("blocks",),
    why="allow_cache_entry_mutation=True: the saved product is the changed one, and is changed again.",
    fix="Leave it off, and change out of place.",
)
