"""`shard=candidate`: one named sharding candidate for all linears of a pattern."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from strategies.base import check_simple_fields
from strategies.errors import StrategyError
from strategies.shard.choice import megatron, restricted, with_random_numbers_of
from strategies.shard.derivation import DEFAULT_HARDWARE
from strategies.shard.graph import ModelGraph, TensorAxis, model_graph
from strategies.shard.plans import ShardPlan
from strategies.shard.programme import Limits, cheapest
from strategies.shard.ways import Leaf, Option
from strategies.sharding import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCandidate(Sharding):
    """Run the linears of a pattern by one candidate, and everything else replicated.

    Saved: what the candidate shards.
    Recomputed: nothing.
    Moved: the candidate's own collectives, and what brings its operands from and to the rest of the model;
        of the ways to do that, the cheapest.

    Fields:
        candidate: name of a candidate of a linear on one mesh axis: `RS0 = RR x RS0` shards output features,
            `RR = RS0 x S0R` input features, `S0R = S0R x RR_0` the first dimension of the batch.
        modules: pattern of the FQNs of linears, in which `*` stands for any characters.
    """

    candidate: str = "RS0 = RR x RS0"
    modules: str = "*"

    def __post_init__(self) -> None:
        check_simple_fields("shard", self)

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> ShardPlan:
        """Return the plan; as `Sharding.plan`."""
        graph = model_graph(model, sample, axis, DEFAULT_HARDWARE, where="shard")
        self._check(graph)
        if any(node.is_random for node in graph.nodes):
            graph = with_random_numbers_of(graph, megatron(graph, where="shard"))
        choice = cheapest(restricted(graph, self._allows), Limits())
        if choice is None:
            problem = f"{self.candidate!r} would draw other random numbers than shard=none"
            raise StrategyError("shard.candidate", f"{problem}; use model.dropout=0, or other modules")
        return ShardPlan.of(graph, choice, axis.ranks)

    def _check(self, graph: ModelGraph) -> None:
        """Refuse a pattern without linears, and a name that one of them does not have."""
        linears = [node.leaf.fqn for node in graph.nodes if node.leaf is not None and _is_linear(node.leaf)]
        if not any(self._matches(fqn) for fqn in linears):
            some = ", ".join(linears[:4]) + (", ..." if len(linears) > 4 else "")  # noqa: PLR2004 (enough to see how they are named)
            raise StrategyError(
                "shard.modules", f"{self.modules!r} matches no linear; there are {some or 'none'}"
            )
        for node in graph.nodes:
            if node.leaf is None or not _is_linear(node.leaf) or not self._matches(node.leaf.fqn):
                continue
            names = dict.fromkeys(option.way.name for option in node.options if option.way is not None)
            if self.candidate not in names:
                raise StrategyError(
                    "shard.candidate",
                    f"{node.leaf.fqn!r} has no candidate {self.candidate!r}; it has: {', '.join(names)}",
                )

    def _matches(self, fqn: str) -> bool:
        return fnmatchcase(fqn, self.modules)

    def _allows(self, leaf: Leaf, option: Option) -> bool:
        assert option.way is not None
        if _is_linear(leaf) and self._matches(leaf.fqn):
            return option.way.name == self.candidate
        return option.way.choice is None


def _is_linear(leaf: Leaf) -> bool:
    return isinstance(leaf.module, nn.Linear)
