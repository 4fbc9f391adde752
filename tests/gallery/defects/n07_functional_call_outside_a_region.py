"""torch.func.functional_call swaps the weights around forward only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Stateless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks(Dense(), Dense())

    def forward(self, x: torch.Tensor) -> Any:
        scaled = {name: 1.7 * each for name, each in self.inner.named_parameters()}
        return functional_call(self.inner, scaled, (x,))


def make() -> nn.Module:
    return Stateless()


def variant(model: nn.Module) -> nn.Module:
    checkpointed(model.get_submodule("inner"))
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=0.56),
    names=("blocks",),
    why="functional_call puts the module's own weights back before backward recomputes with them.",
    fix="Call functional_call inside of the region, with the weights as its inputs.",
)
