"""torch.compile alone recomputes from a buffer that the graph has changed."""

from __future__ import annotations

import torch
from torch import nn

from tests.gallery.case import Case, Evidence


class Mutating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.register_buffer("scale", torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.get_buffer("scale")
        y = ((scale.sin().cos() * self.weight * x).exp() * scale.sin().cos()).sum()
        scale.add_(1.0)
        return y


def make() -> nn.Module:
    return Mutating().double()


def variant(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)
    return model


CASE = Case(
    make=make,
    batch=(torch.ones(64, dtype=torch.double),),
    variant=variant,
    verdict="differs",
    evidence=Evidence(gradients=0.59),
    names=("weight", "scale"),
    needs="compiler",
    link="https://github.com/pytorch/pytorch/pull/197039",
    why="The partitioner recomputes a read of an input that forward mutates, without any checkpointing.",
    fix="Compute with a clone of the buffer, or change it outside of the compiled function.",
)
