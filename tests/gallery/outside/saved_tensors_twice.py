"""backward of a custom function reads ctx.saved_tensors twice, in a region that answers once.

A public report on a scan kernel. The recomputation repeats forward; nothing has changed since.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.outside._checked import checked

BEFORE = "it depends on something that has changed since; no remedy"
RIGHT = "read ctx.saved_tensors once; with use_reentrant=True it is neutral"

_WIDTH = 6


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if len(ctx.saved_tensors) == 0:
            raise RuntimeError("nothing was saved")
        (x,) = ctx.saved_tensors
        result: Tensor = 2 * x * gradient
        return result


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(_Square.apply(self.up(x)).tanh())
        return outputs


def answer() -> str:
    """Return what the reason says, and the remedy."""
    inputs = torch.sin(torch.arange(30.0)).view(5, _WIDTH).requires_grad_()
    found = checked(lambda: nn.Sequential(_Block(), _Block()), (inputs,), _checkpoint)
    known = ("read ctx.saved_tensors once", "it depends on something that has changed since")
    said = next((words for words in known if words in found.reason), found.reason)
    return f"{said}; {getattr(found, 'remedy', '') or 'no remedy'}"


def _checkpoint(model: nn.Sequential) -> None:
    for block in model:
        region: Any = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = region
