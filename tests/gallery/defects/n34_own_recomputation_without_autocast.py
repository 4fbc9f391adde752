"""A recomputing function of one's own leaves autocast off."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows, run_by


class Recompute(Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: torch.Tensor) -> Any:
        ctx.run, ctx.x = run, x
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(*grads)
        return None, x.grad


class Wide(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).float()


class Mixed(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.sin().requires_grad_()).float()


def make() -> nn.Module:
    return Mixed(Wide(), Wide())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(run_by, call=Recompute.apply),
    verdict="differs",
    evidence=Evidence(gradients=0.0092),
    names=("blocks",),
    why="Backward runs outside of autocast, so forward runs again in another precision.",
    fix="Use torch.utils.checkpoint, or torch.amp.custom_fwd and custom_bwd.",
)
