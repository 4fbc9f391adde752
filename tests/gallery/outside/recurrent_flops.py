"""Count the FLOPs of an LSTM, and of what is run again where its layers are checkpointed.

The fused operator of recurrent layers had no formula: its forward was 0 FLOPs, and so was its recomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.check import assert_neutral
from strategies.ac.full import Full

BEFORE = "0 of 3145728 FLOPs are recomputed"
RIGHT = "3145728 of 3145728 FLOPs are recomputed"

_BATCH, _STEPS, _WIDTH, _LAYERS = 4, 16, 32, 3


class Block(nn.Module):
    """An LSTM of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(_WIDTH, _WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        outputs: Tensor = self.recurrent(x)[0]
        return outputs


class Stack(nn.Module):
    """Recurrent blocks one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        for block in self.blocks:
            x = block(x)
        return x


def answer() -> str:
    """Return the recomputed FLOPs, and those of the four gates of each token by hand."""
    found = assert_neutral(Stack, (torch.ones(_BATCH, _STEPS, _WIDTH),), Full(layers_fqn="blocks"))
    by_hand = _LAYERS * 2 * _BATCH * _STEPS * 4 * _WIDTH * (_WIDTH + _WIDTH)
    return f"{found.recomputed_flops} of {by_hand} FLOPs are recomputed"
