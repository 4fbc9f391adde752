"""`shard=megatron`: linears by column and then by row, from their sharding candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.estimate.machine import A100
from strategies.shard.base import Sharding
from strategies.shard.model import choice, graph_building, shard_plan

if TYPE_CHECKING:
    from torch import nn

    from strategies.shard.model.graph import TensorAxis


@dataclass(frozen=True, kw_only=True, slots=True)
class Megatron(Sharding):
    """Shard heads and hidden units: a column-parallel linear feeds a row-parallel one.

    Use when: the model has a tensor parallel plan, and the record shall count what its pairs communicate.

    Saved: (n-1)/n of the weights of those linears, and of what lies between them.
    Recomputed: nothing.
    Moved: one all-reduce of the output of each row-parallel linear forward, and one of the input gradient
        of each column-parallel linear backward.

    Which linears these are is the model's tensor parallel plan, as with `shard=none`; they run by the
    candidates `RS0 = RR x RS0` and `RR = RS0 x S0R`.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> shard_plan.ShardPlan:
        """Return the plan; as `Sharding.plan`."""
        found = graph_building.model_graph(model, sample, axis, A100)
        return shard_plan.ShardPlan.of(found, choice.megatron(found), axis.ranks)
