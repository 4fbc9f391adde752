"""A wrapper checkpoints the block with its first argument only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import WIDTH, Blocks, Dense, rows


class Attending(Dense):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return super().forward(x if mask is None else x * mask)


class Masking(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.arange(WIDTH) % 2
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.squared(x)


def make() -> nn.Module:
    return Masking(Attending(), Attending())


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        plain = block.forward
        block.forward = lambda x, plain=plain, **_: checkpoint(plain, x, use_reentrant=False)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(parts=("loss", "gradients"), gradients=7.1),
    names=("outputs", "output", "loss", "blocks"),
    link="https://github.com/lightly-ai/lightly/issues/2049",
    why="The mask has a default, so nothing misses it.",
    fix="Pass *args and **kwargs through.",
)
