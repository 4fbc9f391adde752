"""A reentrant block returns a buffer beside its result.

Found with a test of torch for its own checkpoints, where a tensor on its own hangs, too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from strategies.ac.full import Full

BEFORE = "the buffer requires a gradient, and backward hangs"
RIGHT = "the buffer requires no gradient, and backward ends"


class Block(nn.Module):
    """A layer and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table: Tensor
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a tensor of the shape of `x`, and the table."""
        return self.layer(x), {"table": self.table}


class Model(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Any:
        """Return what the block returns."""
        return self.blocks[0](x)


def answer() -> str:
    """Return what becomes of the buffer and of backward."""
    model = Model()
    result, _ = Full(layers_fqn="blocks", use_reentrant=True).apply(model)(
        torch.ones(2, 4, requires_grad=True)
    )
    requires = model.get_buffer("blocks.0.table").requires_grad
    backward = threading.Thread(target=result.sum().backward, daemon=True)
    backward.start()
    backward.join(timeout=10.0)
    ends = "hangs" if backward.is_alive() else "ends"
    return f"the buffer requires {'a' if requires else 'no'} gradient, and backward {ends}"
