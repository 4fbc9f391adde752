"""Checkpointing is on twice: by the model's own switch, and around its blocks.

A public report: training is slow, and nothing says why. In the other case the plain model recomputes already.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strategies.ac.full import Full
from tests.gallery.outside._checked import checked

BEFORE = "twice: not said; by itself: checkpointing never took place"
RIGHT = (
    "twice: 'blocks.0', 'blocks.1' checkpointed twice; by itself: the plain model checkpoints itself already"
)

_WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(self.up(x).tanh()).sin()
        return outputs


class _Model(nn.Module):
    def __init__(self, *, is_on: bool = False) -> None:
        super().__init__()
        self.blocks, self.is_on = nn.ModuleList(_Block() for _ in range(2)), is_on

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_on else block(x)
        return x


def answer() -> str:
    """Return the note on the first, and the cause of the second."""
    inputs = (torch.sin(torch.arange(48.0)).view(6, _WIDTH),)
    notes = checked(_Model, inputs, _twice).notes
    twice = next((note for note in notes if "checkpointed twice" in note), "not said: ")
    cause = checked(partial(_Model, is_on=True), inputs, Full(layers_fqn="blocks")).cause
    never = "checkpointing never took place"
    said = twice.partition(", one region")[0].replace(": checkpointed", " checkpointed").removesuffix(": ")
    return f"twice: {said}; by itself: {never if never in cause else cause}"


def _twice(model: _Model) -> None:
    model.is_on = True
    for block in model.blocks:
        region: Any = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = region
