"""The weights of two losses come from autograd.grad in forward, so the graph is walked more than once.

Three public reports. A region that is not reentrant takes several walks; a reentrant one and torch's save
list do not, and each has another remedy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.outside._checked import remedy

BEFORE = "non-reentrant: neutral; reentrant: differs"
RIGHT = "non-reentrant: neutral; reentrant: differs, with use_reentrant=False it is neutral"

_WIDTH = 8


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(torch.dropout(self.up(x).tanh(), 0.1, self.training))
        return outputs


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.one, self.other = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for block in self.blocks:
            hidden = block(hidden)
        one, other = (self.one(hidden) - x).abs().mean(), self.other(hidden).square().mean()
        first: Any = self.blocks[0]
        weight = first.up.weight
        slopes = [torch.autograd.grad(each, weight, retain_graph=True)[0].norm() for each in (one, other)]
        total: Tensor = one + (slopes[0] / (slopes[1] + 1e-4)).detach() * other
        return total


def answer() -> str:
    """Return verdict and remedy of both."""
    inputs = (torch.sin(torch.arange(48.0)).view(6, _WIDTH),)
    said = {
        name: remedy(_Model, inputs, partial(_checkpoint, use_reentrant=name == "reentrant"), _itself)
        for name in ("non-reentrant", "reentrant")
    }
    return "; ".join(f"{name}: {each}" for name, each in said.items())


def _itself(loss: Tensor) -> Tensor:
    return loss


def _checkpoint(model: _Model, *, use_reentrant: bool) -> None:
    for block in model.blocks:
        region: Any = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
        block.forward = region
