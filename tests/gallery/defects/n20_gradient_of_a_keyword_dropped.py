"""A recomputing function of one's own drops the gradient of a keyword."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


class Recompute(Function):
    @staticmethod
    def forward(ctx: Any, run: Any, keywords: Any, x: torch.Tensor) -> Any:
        ctx.run, ctx.x = partial(run, **{name: each.detach() for name, each in keywords.items()}), x
        return ctx.run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(*grads)
        return None, None, x.grad


class Crossing(Dense):
    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> Any:
        return super().forward(x if memory is None else x + memory)


class Crossed(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        x, memory = x.sin().requires_grad_(), self.blocks[0](x)
        return self.squared(self.blocks[1](x, memory=memory))


def make() -> nn.Module:
    return Crossed(Dense(), Crossing())


def variant(model: nn.Module) -> nn.Module:
    block = model.get_submodule("blocks.1")
    plain = block.forward
    block.forward = lambda x, **keywords: Recompute.apply(plain, keywords, x)
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=float("inf")),
    names=("memory", "source", "blocks"),
    link="https://github.com/NVIDIA/Megatron-LM/pull/4766",
    why="An autograd Function differentiates positional tensors only; others are constants to it.",
    fix="Pass every tensor by position, or use torch.utils.checkpoint.",
)
