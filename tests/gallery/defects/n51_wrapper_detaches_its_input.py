"""A wrapper detaches the input of each region."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        plain = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = lambda x, plain=plain: plain(x.detach().requires_grad_())
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=float("inf")),
    names=("blocks",),
    link="https://github.com/InternLM/xtuner/pull/2048",
    why="The gradient ends at the region's door; the blocks before it get none.",
    fix="Detach in recomputation only, as torch.utils.checkpoint does.",
)
