"""`chunk=budget`: run parts of the model in chunks, so that activations stay within a budget."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import PlannedStep, StrategyError
from strategies.chunk.base import Chunking, is_trained
from strategies.chunk.planning import chunk_plan

if TYPE_CHECKING:
    from torch import nn

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget(Chunking):
    """Keep the activation peak of a pass within a budget of bytes, at the least time.

    Use when: the peak lies inside a block, as with attention scores or logits, and memory has a limit.

    Saved: in training, the inputs of loops, and of blocks that run again as a whole.
    Recomputed: in backward, the operators of loops and of such blocks, once.
    The loss outside the model is counted; that of a language model is chunked where a budget needs it.

    Fields:
        budget_mib: MiB of activations, above 0.
        fraction: share of the peak with the same activation checkpointing and no chunks, above 0 and at most
            1. Exactly one of the two fields is given.

    Source: Zhao et al. 2024, AutoChunk, arXiv:2401.10652, for the idea of chunks under a budget.
    """

    budget_mib: float | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        """Refuse both budgets, none, and a number out of range."""
        if (self.budget_mib is None) == (self.fraction is None):
            given = "both" if self.fraction is not None else "neither"
            raise StrategyError("chunk", f"give one of chunk.budget_mib and chunk.fraction, got {given}")
        if self.fraction is not None:
            chunk_plan.require_number("chunk.fraction", self.fraction, "above 0 and at most 1", 1)
            return
        most = sys.float_info.max
        chunk_plan.require_number("chunk.budget_mib", self.budget_mib, "above 0 and finite", most)

    def plan(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> chunk_plan.ChunkPlan:
        """Return the plan of `model` for the budget."""
        return chunk_plan.ChunkPlan.make(
            model,
            sample,
            None if self.budget_mib is None else max(int(min(self.budget_mib * _MIB, sys.maxsize)), 1),
            fraction=self.fraction,
            training=is_trained(model),
            step=step,
            where="chunk.fraction" if self.budget_mib is None else "chunk.budget_mib",
        )
