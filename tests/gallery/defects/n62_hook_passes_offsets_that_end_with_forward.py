"""A hook gives adapters their offsets, and takes them back when forward ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Offset(Dense):
    offset: float | None = None

    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) + (self.offset or 0.0)).tanh()


def give(model: Any, *_: Any) -> None:
    model.blocks[0].offset = 1.0


def take(model: Any, *_: Any) -> None:
    model.blocks[0].offset = None


def make() -> nn.Module:
    model = Blocks(Offset())
    model.register_forward_pre_hook(give)
    model.register_forward_hook(take)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=1.3),
    names=("offset", "blocks"),
    link="https://github.com/huggingface/peft/issues/2826",
    why="Recomputation runs blocks without the model's hook, so the offsets are not there.",
    fix="Pass offsets as arguments of the blocks.",
)
