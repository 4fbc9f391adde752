"""`chunk=budget`: run parts of the model in chunks, so that activations stay within a budget."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.base import PlannedStep, StrategyError, held_chunks
from strategies.chunk.base import Chunking, FromPlan, is_trained, planning, refuse_units
from strategies.chunk.planning import chunk_plan, offers, plan_json
from strategies.chunk.running import chunked_forward

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

    Beside `ac=budget` it has no budget of its own: that plan says what runs in chunks.

    Fields:
        budget_mib: MiB of activations, above 0.
        fraction: share of the peak with the same activation checkpointing and no chunks, above 0 and at most
            1. Exactly one of the two is given; neither with `ac=budget`, whose budget counts for both.

    Source: Zhao et al. 2024, AutoChunk, arXiv:2401.10652, for the idea of chunks under a budget.
    """

    budget_mib: float | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        """Refuse both budgets, and a number out of range."""
        if self.follows:
            return
        if self.budget_mib is not None and self.fraction is not None:
            raise StrategyError("chunk", "give one of chunk.budget_mib and chunk.fraction, got both")
        if self.fraction is not None:
            chunk_plan.require_number("chunk.fraction", self.fraction, "above 0 and at most 1", 1)
            return
        most = sys.float_info.max
        chunk_plan.require_number("chunk.budget_mib", self.budget_mib, "above 0 and finite", most)

    @property
    def follows(self) -> bool:
        """True if the budget is that of activation checkpointing."""
        return self.budget_mib is None and self.fraction is None

    @property
    def chunk_offers(self) -> Budget | None:
        """Itself, where it follows."""
        return self if self.follows else None

    def offers(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> list[Mapping[str, Any]]:
        """Return plans to choose from, from few loops to the smallest peak, as `with_plan` reads them.

        Raises:
            StrategyError: the model is unsuitable, or chunked already.
        """
        with planning(sample):
            return [
                plan_json.plan_to_json(each) for each in offers.offers(self._planner(model, sample, step))
            ]

    def check_offers(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> None:
        """Refuse a model of which nothing can be planned; it is recorded, and no plan is sought.

        Raises:
            StrategyError: the model is unsuitable, or chunked already.
        """
        with planning(sample):
            self._planner(model, sample, step)

    def with_plan(self, file: Path) -> FromPlan | None:
        """Return the variant that carries out the chunks in `file`, `None` where these are none.

        Raises:
            StrategyError: it cannot be read, or is no plan file.
        """
        return None if held_chunks(file) is None else FromPlan(plan_file=str(file))

    def check_units(self, model: nn.Module, units: Collection[str]) -> None:
        """Refuse an FSDP unit inside a chunked forward, or inside one that will be.

        Raises:
            StrategyError: naming the unit.
        """
        if self.follows:
            refuse_units(chunked_forward.scopes_of(model), units)
        Chunking.check_units(self, model, units)

    def _planner(
        self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep
    ) -> chunk_plan.ChunkPlanner:
        return chunk_plan.ChunkPlanner.of(model, sample, training=True, step=step, where="chunk")

    def plan(self, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> chunk_plan.ChunkPlan:
        """Return the plan of `model` for the budget."""
        if self.follows:
            problem = "give one of chunk.budget_mib and chunk.fraction, got neither"
            raise StrategyError("chunk", f"{problem}; without one it follows ac=budget")
        return chunk_plan.ChunkPlan.make(
            model,
            sample,
            None if self.budget_mib is None else max(int(min(self.budget_mib * _MIB, sys.maxsize)), 1),
            fraction=self.fraction,
            training=is_trained(model),
            step=step,
            where="chunk.fraction" if self.budget_mib is None else "chunk.budget_mib",
        )
