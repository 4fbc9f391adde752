"""`ac=selective_layer`: recompute some of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.ac.base import Recomputing
from strategies.base import StrategyError

if TYPE_CHECKING:
    from torch import nn

    from strategies.regions.region import RegionCallSite


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveLayer(Recomputing):
    """Checkpoint one block in every `ac_freq`: blocks k-1, 2k-1, ... (0-based) of this model, always.

    Use when: `full` frees more memory than needed; each block without a region is not recomputed.

    Saved: the inputs of checkpointed blocks, and all activations of the others.
    Recomputed: the forward of floor(L / ac_freq) of the L blocks, once a step.
    Moved: nothing.

    Fields:
        ac_freq: distance between checkpointed blocks, >= 1; 1 is full AC, more than L is none.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.1.
    """

    scales_with_batch: ClassVar[bool] = True

    ac_freq: int = 2

    def __post_init__(self) -> None:
        Recomputing.__post_init__(self)  # a slotted dataclass has no zero-argument super()
        if self.ac_freq < 1:
            raise StrategyError("ac.ac_freq", f"must be at least 1, got {self.ac_freq}")

    def call_site(self, model: nn.Module) -> RegionCallSite:  # noqa: ARG002 (refused whatever the model)
        """Refuse: one region around the whole model leaves no blocks to choose from.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "wrap_order",
            "call_site makes the model one region, and selective_layer chooses among blocks; use ac=full",
        )

    def _chosen(self, fqns: Sequence[str]) -> Sequence[str]:
        return fqns[self.ac_freq - 1 :: self.ac_freq]
