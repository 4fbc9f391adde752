"""A cache of keys and values is an argument of blocks that are recomputed, and grows once more.

Three public reports. The person wants to know which object of which block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.outside._checked import checked

BEFORE = "no argument is named; no remedy"
RIGHT = "argument 'cache' of blocks.0; with a copy of the arguments inside of the region it is neutral"

_WIDTH = 8


class _Block(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.query, self.key = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        key = self.key(x)
        key = cache[self.place] = torch.cat([cache[self.place], key], 1) if self.place in cache else key
        outputs: Tensor = x + torch.softmax(self.query(x) @ key.transpose(1, 2), -1) @ key
        return outputs


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(place) for place in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache: dict[int, Tensor] = {}
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


def answer() -> str:
    """Return the argument that the check names first, and the remedy."""
    found = checked(_Model, (torch.sin(torch.arange(80.0)).view(2, 5, _WIDTH),), _checkpoint)
    named = next((name for name in found.changed if name.startswith("argument")), "no argument is named")
    return f"{named}; {getattr(found, 'remedy', '') or 'no remedy'}"


def _checkpoint(model: _Model) -> None:
    for block in model.blocks:
        region: Any = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = region
