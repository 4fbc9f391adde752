"""Offload hooks copy to one host buffer for each shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    plain, pool = model.forward, dict[torch.Size, torch.Tensor]()

    def pack(each: torch.Tensor) -> torch.Tensor:
        host = pool.setdefault(each.shape, torch.empty_like(each.detach()))
        return host.copy_(each.detach())

    def forward(x: torch.Tensor) -> Any:
        with saved_tensors_hooks(pack, torch.clone):
            return plain(x)

    model.forward = forward
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=1.8),
    names=("head.weight",),
    why="The second tensor of a shape overwrites the first before backward has read it.",
    fix="Give a buffer back to the pool in unpack, not before.",
)
