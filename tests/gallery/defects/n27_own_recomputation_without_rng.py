"""A recomputing function of one's own saves no RNG state."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Rooted, linear, rows, run_by


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


def make() -> nn.Module:
    return Rooted(*(nn.Sequential(linear(), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)))


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(run_by, call=Recompute.apply),
    verdict="differs",
    evidence=Evidence(parts=("gradients", "rng_state"), gradients=1.3),
    names=("blocks",),
    link="https://github.com/openai/guided-diffusion/issues/167",
    why="The function runs forward again in backward and draws dropout anew.",
    fix="Use torch.utils.checkpoint, which saves the RNG state.",
)
