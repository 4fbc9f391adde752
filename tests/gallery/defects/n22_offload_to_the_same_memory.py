"""save_on_cpu on a CPU hides the error of an in-place operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, rows


class Shifted(Dense):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x).exp()
        y.mul_(2.0)
        return y.sin()


def make() -> nn.Module:
    return Blocks(Shifted())


def variant(model: nn.Module) -> nn.Module:
    plain = model.forward

    def forward(x: torch.Tensor) -> Any:
        with save_on_cpu():
            return plain(x)

    model.forward = forward
    return model


CASE = Case(
    make=make,
    batch=rows(),
    variant=variant,
    verdict="differs",
    evidence=Evidence(parts=("hides_error",)),
    names=("Exp",),
    why="On one memory the copy to the host is the tensor itself, and hooks skip the version check.",
    fix="Write y = y * 2, and offload on a device with memory of its own only.",
)
