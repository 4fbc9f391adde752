"""FP8 casts with the amax value of the previous call, and recomputation is a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case, Evidence
from tests.gallery.parts import Blocks, Dense, checkpointed, rows


class Delayed(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.full((), 100.0))

    def forward(self, x: torch.Tensor) -> Any:
        y, scale = self.linear(x), 448 / self.get_buffer("amax").clone()
        quantised = y + ((y * scale).to(torch.float8_e4m3fn).to(y.dtype) / scale - y).detach()
        self.get_buffer("amax").copy_(y.detach().abs().max() * 1e-3)
        return (quantised * quantised).sin()


def make() -> nn.Module:
    return Blocks(Delayed())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    verdict="differs",
    evidence=Evidence(gradients=1.0),
    names=("amax", "blocks"),
    link="https://github.com/NVIDIA/TransformerEngine/issues/1254",
    why="The region updates the scale that it reads.",
    fix="Update the scale after the step, or put it back for recomputation.",
)
