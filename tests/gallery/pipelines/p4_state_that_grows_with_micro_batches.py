"""A block reads a list that grows with each micro-batch, and is recomputed when it has grown further."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategies.ac.full import Full
from tests.gallery.parts import linear
from tests.gallery.pipelines.stages import StepCase, apart, checkpointed, trained


class Remembering(nn.Module):
    """A layer that adds the mean of what it has seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = linear()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x.detach().mean(0))
        return (self.linear(x) + torch.stack(self.seen).mean(0)).tanh()


def by_torch() -> str:
    _, expected = trained(block=Remembering)
    _, gradients = trained(checkpointed, block=Remembering)
    _, rewound = trained(Full(layers_fqn="blocks", rewind=True), block=Remembering)
    return f"gradients are {apart(gradients, expected):.1g} apart, {apart(rewound, expected)} with rewind"


CASE = StepCase(
    by_torch=by_torch,
    says="gradients are 0.05 apart, 0.0 with rewind",
    here="verdict `differs`; `ac.rewind=true` puts the list back for the recomputation",
    verdict="differs",
    why="Micro-batches are in flight: the recomputation of one finds what later ones have left.",
    fix="Pass what the block reads as an argument, or `ac.rewind=true`.",
)
