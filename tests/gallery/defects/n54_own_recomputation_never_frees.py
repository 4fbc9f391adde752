"""A recomputing function of one's own looks its inputs up in a table and never frees them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Dense, Rooted, rows


class Recompute(Function):
    @staticmethod
    def forward(ctx: Any, run: Any, kept: Any, x: torch.Tensor) -> Any:
        ctx.run, ctx.kept, ctx.number = run, kept, len(kept)
        kept[ctx.number] = x.detach()
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.kept[ctx.number].requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(*grads)
        return None, None, x.grad


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.forward = partial(Recompute.apply, block.forward, {})
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(parts=("leak",)),
    names=("blocks",),
    why="Backward reads its input from the table and leaves it there.",
    fix="Take it out with pop, or use ctx.save_for_backward.",
)
