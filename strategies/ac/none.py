"""`ac=none`: keep every activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Strategy
from strategies.regions import region

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCheckpoints(Strategy):
    """Keep every activation; the baseline of every comparison.

    Use when: the model fits as it is, and as the baseline of other variants.

    Saved: every tensor that autograd needs.
    Recomputed: nothing.
    Moved: nothing.
    """

    acts_on_each_block_alone: ClassVar[bool] = True
    scales_with_batch: ClassVar[bool] = True

    def apply(self, model: nn.Module, sample: tuple[Any, ...] = ()) -> nn.Module:  # noqa: ARG002 (nothing to look at)
        """Return `model` untouched."""
        return model

    def call_site(self, model: nn.Module) -> region.RegionCallSite:
        """Return `model` as a callable, with nothing around it."""
        return region.RegionCallSite(model, None)
