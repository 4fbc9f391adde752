"""A recomputing function of one's own asks for the gradient of its input only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, Dense, rows

FACTS = Defect(
    gradients=float("inf"),
    link="https://github.com/ooples/AiDotNet.Tensors/pull/643",
    cause="autograd.grad(y, x) leaves the parameters of the region without a gradient.",
    fix="Call backward, which reaches parameters, too.",
)


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


class Rooted(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.sin().requires_grad_())


def make() -> nn.Module:
    return Rooted(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        block.forward = partial(Recompute.apply, block.forward)
    return model


batch = rows()
