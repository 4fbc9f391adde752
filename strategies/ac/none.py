"""`ac=none`: keep every activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import Strategy
from strategies.regions import region

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCheckpoints(Strategy):
    """Keep every activation; the baseline of every comparison.

    Saved: every tensor that autograd needs.
    Recomputed: nothing.
    Moved: nothing.
    """

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (nothing to look at)
        """Return `model` untouched."""
        return model

    def call_site(self, model: nn.Module) -> region.RegionCallSite:
        """Return `model` as a callable, with nothing around it."""
        return region.RegionCallSite(model, None)
