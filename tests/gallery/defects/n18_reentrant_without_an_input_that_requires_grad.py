"""A reentrant region gets no input that requires a gradient."""

from __future__ import annotations

from functools import partial

from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


CASE = Case(
    make=make,
    batch=rows(),
    variant=partial(checkpointed, use_reentrant=True),
    verdict="differs",
    evidence=Evidence(
        gradients=float("inf"),
        torch_says="None of the inputs have requires_grad=True. Gradients will be None",
    ),
    names=("blocks",),
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5586",
    why="Reentrant checkpointing runs forward without a graph and enters autograd by its inputs only.",
    fix="Use use_reentrant=False, or let an input require a gradient.",
)
