"""Models and checkpointing, as functions of `ac=python`, that go wrong on one rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.models.parts.context_attention import METHODS, Operands, Ring, Weighing, _Gathered
from tests.gallery.parts import WIDTH, Blocks, Dense


class Placed(Dense):
    """A block with a table of positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.sin(torch.arange(12 * WIDTH).view(12, WIDTH))

    def forward(self, x: Tensor) -> Any:
        """Return `(B, WIDTH)`."""
        return (self.linear(x) * self.positions[: len(x)]).tanh()


class CutsPositions(Blocks):
    """The model of rank 1 of 2, which cuts the table around its forward, as for a part of the sequence."""

    def __init__(self) -> None:
        super().__init__(Placed())

    def forward(self, x: Tensor) -> Any:
        """Return the squared output of the head."""
        table = self.blocks[0].positions
        whole = table.clone()
        table[:6] = whole[6:]
        y = super().forward(x)
        table.copy_(whole)
        return y


def gathers_values_first(model: nn.Module) -> None:
    """Let rank 1 gather values before keys when it recomputes: sizes are equal, and no collective fails."""
    _checkpoint(model, _values_first)


def asks_once_more(model: nn.Module) -> None:
    """Let rank 1 begin its recomputation with a collective that no other rank begins."""
    _checkpoint(model, _one_more)


def _checkpoint(model: nn.Module, on_rank_1: Callable[..., Any]) -> None:
    """Checkpoint each block; rank 1 recomputes it by a function of its forward and its arguments."""
    blocks: Any = model.layers
    for block in blocks:
        run = partial(_run, block.forward, on_rank_1)
        block.forward = partial(checkpoint, run, use_reentrant=False)


def _run(forward: Callable[..., Any], on_rank_1: Callable[..., Any], *args: Any) -> Any:
    is_recomputing = torch._C._current_graph_task_id() >= 0
    if is_recomputing and dist.is_initialized() and dist.get_rank() == 1:
        return on_rank_1(forward, *args)
    return forward(*args)


def _one_more(forward: Callable[..., Any], *args: Any) -> Any:
    dist.all_reduce(torch.zeros(3))
    return forward(*args)


def _values_first(forward: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.dict(METHODS, gather=_gather_values_first):
        return forward(*args)


def _gather_values_first(ring: Ring, operands: Operands, weighing: Weighing) -> Tensor:
    q_BHSK, k, v = operands
    v, k = (_Gathered.apply(part, ring, 2) for part in (v, k))
    length = q_BHSK.size(2)
    sees = torch.ones(length, k.size(2), dtype=torch.bool).tril(ring.rank * length)
    return functional.scaled_dot_product_attention(
        q_BHSK, k, v, attn_mask=sees, dropout_p=weighing.dropout_p, enable_gqa=True
    )
