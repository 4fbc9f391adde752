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
    """Make the activation peak of a pass as small as the search finds, whatever the time.

    Use when: you ask how little memory the model can run in; `budget` is faster where there is a limit.

    Saved: in training, the inputs of loops, and of blocks that run again as a whole.
    Recomputed: in backward, the operators of loops and of such blocks, once.
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
