"""A recomputing function of one's own keeps the input of the last call only."""

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
        ctx.run, ctx.kept, kept[:] = run, kept, [x.detach()]
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.kept[0].requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(*grads)
        return None, None, x.grad


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.forward = partial(Recompute.apply, block.forward, [])
    return model


CASE = Case(
    make=make,
    batch=[rows(), (rows()[0].cos(),)],
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=4.9),
    names=("blocks",),
    why="The second micro-batch overwrites the input of the first before its backward.",
    fix="Keep the input on ctx, with save_for_backward.",
)
