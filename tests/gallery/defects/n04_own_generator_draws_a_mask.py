"""A mask comes from a torch.Generator of the module's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = linear(), torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.linear(x) * (torch.rand(x.shape, generator=self.generator) > 0.5)).tanh()


def make() -> nn.Module:
    return Blocks(Masked())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(parts=("gradients", "state"), gradients=0.9),
    names=("generator", "blocks"),
    why="preserve_rng_state covers the default generators only.",
    fix="Draw the mask before the region, or save and restore the generator's state in the region.",
)
