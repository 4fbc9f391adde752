"""A recomputing function of one's own that calls backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case
from tests.gallery.parts import Dense, Rooted, rows, run_by


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


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(run_by, call=Recompute.apply),
    like=52,
    why="There is nothing to draw, no autocast, and backward reaches the parameters.",
)
