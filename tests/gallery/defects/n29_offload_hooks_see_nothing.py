"""Offload hooks around selective checkpointing never see what it saves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, checkpointed, linear, rows


def make() -> nn.Module:
    save = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpointed(Blocks(nn.Sequential(linear(bias=False), nn.Tanh())), context_fn=save)


def variant(model: nn.Module) -> nn.Module:
    plain = model.forward

    def forward(x: torch.Tensor) -> Any:
        with saved_tensors_hooks(lambda each: each.to("cpu", copy=True), lambda each: each):
            return plain(x)

    model.forward = forward
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="inert",
    evidence=Evidence(parts=()),
    names=("saved", "nothing", "inert"),
    link="https://github.com/pytorch/pytorch/pull/190581",
    why="Selective checkpointing keeps its tensors in a cache of its own, past saved_tensors_hooks.",
    fix="Offload inside of the region, or respect_saved_tensors_hooks=True from torch 2.14 on.",
)
