"""A recomputing function of one's own that calls backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case
from tests.gallery.parts import Blocks, Dense, rows


class Recompute(Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(*grads)
        return None, x.grad


class Rooted(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.sin().requires_grad_())


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.forward = partial(Recompute.apply, block.forward)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    like=52,
    why="There is nothing to draw, no autocast, and backward reaches the parameters.",
)
