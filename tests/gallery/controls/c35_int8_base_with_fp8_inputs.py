"""LoRA on frozen weights in int8 buffers, with inputs cast to FP8 by the scale of this call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.gallery.case import Case
from tests.gallery.parts import WIDTH, Blocks, checkpointed, linear, rows


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = linear().weight.detach()
        scale = weight.abs().amax() / 127
        self.register_buffer("scale", scale)
        self.register_buffer("whole", (weight / scale).round().to(torch.int8))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        scale = 448 / x.detach().abs().amax()
        narrow = x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()
        base = narrow @ (self.get_buffer("whole").to(x.dtype) * self.get_buffer("scale")).T
        return (base + self.up(self.down(x))).tanh()


def make() -> nn.Module:
    return Blocks(Quantised(), Quantised())


CASE = Case(
    make=make,
    batch=rows(),
    variant=checkpointed,
    like=17,
    why="The scale follows from the input of the call, and nothing is updated.",
)
