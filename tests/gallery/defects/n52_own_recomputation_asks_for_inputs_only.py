"""A recomputing function of one's own asks for the gradient of its input only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Dense, Rooted, rows, run_by


class Recompute(Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run, ctx.x = run, x
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.run(x), x, grads)


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(run_by, call=Recompute.apply),
    verdict="differs",
    evidence=Evidence(gradients=float("inf")),
    names=("blocks",),
    link="https://github.com/ooples/AiDotNet.Tensors/pull/643",
    why="autograd.grad(y, x) leaves the parameters of the region without a gradient.",
    fix="Call backward, which reaches parameters, too.",
)
