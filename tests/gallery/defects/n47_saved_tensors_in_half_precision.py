"""Hooks keep saved tensors in bfloat16."""

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
    plain = model.forward

    def forward(x: torch.Tensor) -> Any:
        with saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
            return plain(x)

    model.forward = forward
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=0.005),
    names=("head.bias",),
    why="Each saved tensor loses sixteen bits, weights included.",
    fix="Keep the dtype, or declare a tolerance and test the training.",
)
