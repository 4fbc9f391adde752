"""`chunk=minimum`: run the model in the chunks that need the least memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import PlannedStep
from strategies.chunk.base import Chunking, is_trained
from strategies.chunk.planning import chunk_plan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Minimum(Chunking):
    """Make the activation peak of a pass as small as the search can, whatever the time.

    Saved: in training, what the loops take; nothing of what they compute. Of blocks that run again as a
        whole, their inputs.
    Recomputed: the operators of the loops, once in backward, and those of such blocks.
    """

    def plan(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> chunk_plan.ChunkPlan:
        """Return the plan of `model` with the smallest peak."""
        return chunk_plan.ChunkPlan.make(
            model,
            sample,
            training=is_trained(model),
            step=step,
            where="chunk",
        )
