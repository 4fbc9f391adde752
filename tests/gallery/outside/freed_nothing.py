"""Checkpoint the linear layers in front of and behind recurrent ones, which frees no byte.

A checkpoint keeps the input of a linear layer, as the layer does by itself; stashed random states come on
top. The check passed it as neutral.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.check import NotNeutral, assert_neutral
from strategies.ac.full import Full

BEFORE = "neutral"
RIGHT = "inert: frees nothing"


class Tagger(nn.Module):
    """A linear layer, two recurrent ones and another linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.recurrent = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.outer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of shape (B, S, 2)."""
        x = self.inner(x)
        for layer in self.recurrent:
            x, _ = layer(x)
        outputs: Tensor = self.outer(x)
        return outputs


def answer() -> str:
    """Return the verdict of a check of `ac=full` around the linear layers, and how its reason begins."""
    inputs = torch.sin(torch.arange(400.0)).view(2, 50, 4)
    try:
        return assert_neutral(Tagger, (inputs,), Full(module_classes=("Linear",))).verdict
    except NotNeutral as found:
        return f"{found.verdict}: {(found.found.reason or '').partition(':')[0]}"
