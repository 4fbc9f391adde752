"""Hooks keep saved tensors in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.gallery.facts import Defect
from tests.gallery.parts import Blocks, Dense, rows

FACTS = Defect(
    names=("head.bias",),
    gradients=0.005,
    cause="Each saved tensor loses sixteen bits, weights included.",
    fix="Keep the dtype, or declare a tolerance and test the training.",
)


def make() -> nn.Module:
    return Blocks(Dense(), Dense())


def variant(model: nn.Module) -> nn.Module:
    plain = model.forward

    def forward(x: torch.Tensor) -> Any:
        with saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
            return plain(x)

    model.forward = forward
    return model


batch = rows()
