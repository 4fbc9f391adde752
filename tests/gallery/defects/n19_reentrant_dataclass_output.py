"""A reentrant region returns a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


@dataclass
class Output:
    hidden: torch.Tensor


class Boxed(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return Output(super().forward(x))


class Boxes(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return self.squared(self.blocks[0](x.requires_grad_()).hidden)


def make() -> nn.Module:
    return Boxes(Boxed())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    verdict="differs",
    evidence=Evidence(gradients=float("inf")),
    names=("first", "blocks"),
    link="https://github.com/pytorch/pytorch/issues/124725",
    why="Reentrant checkpointing connects tensors that are outputs, not tensors in an object.",
    fix="Use use_reentrant=False, or return a tuple.",
)
