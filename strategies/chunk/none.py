"""`chunk=none`: run every operator on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import Strategy

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class NoChunks(Strategy):
    """Run every operator on whole tensors; the baseline of every comparison."""

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (nothing to look at)
        """Return `model` untouched."""
        return model
