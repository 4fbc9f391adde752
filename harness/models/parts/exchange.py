"""Rows that ranks give each other, by functional collectives.

Dispatch modes see these: save lists can keep what they give, and recomputation that repeats them is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_functional = torch.ops._c10d_functional  # noqa: SLF001 (torch has no public functional collectives)


def all_to_all(group: dist.ProcessGroup, rows: Tensor, taken: Sequence[int], given: Sequence[int]) -> Tensor:
    """Return the rows that ranks give this one, without a gradient.

    Args:
        rows: those for each rank, one after the other.
        taken, given: how many this rank takes from each, and gives to each.
    """
    started = _functional.all_to_all_single(rows.contiguous(), list(taken), list(given), group.group_name)
    found: Tensor = _functional.wait_tensor(started)
    return found


class Exchanged(torch.autograd.Function):
    """The rows of `all_to_all`; their gradients go back the same way, times `scale`."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd takes operands by position)
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        taken: Sequence[int],
        given: Sequence[int],
        scale: float = 1.0,
    ) -> Tensor:
        """Return what this rank takes."""
        ctx.group, ctx.taken, ctx.given, ctx.scale = group, taken, given, scale
        return all_to_all(group, rows, taken, given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # torch has any
        """Return the gradient of what this rank gave."""
        back = all_to_all(ctx.group, gradient, ctx.given, ctx.taken)
        return (back if ctx.scale == 1 else back * ctx.scale), None, None, None, None
