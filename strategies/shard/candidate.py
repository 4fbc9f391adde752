"""`shard=candidate`: one named sharding candidate for all linears of a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from strategies.base import StrategyError, check_simple_fields
from strategies.estimate.machine import A100
from strategies.shard.base import Sharding
from strategies.shard.model import choice as choices
from strategies.shard.model import graph_building, shard_plan, solver
from strategies.shard.operators import module_operations

if TYPE_CHECKING:
    from torch import nn

    from strategies.shard.candidates.operation import Label
    from strategies.shard.model.graph import ModelGraph, Node, TensorAxis
    from strategies.shard.model.module_options import LeafModule, NodeOption


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCandidate(Sharding):
    """Run the linears of a pattern by one candidate, and everything else replicated.

    Use when: you compare single sharding candidates; for training choose `cheapest` or `megatron`.

    Saved: the parts of operands that other ranks hold.
    Recomputed: nothing.
    Moved: the candidate's own collectives, and the cheapest resharding of its operands from and to the rest
        of the model.

    Fields:
        candidate: name of a candidate of a linear. On the axis `tp`, `RS0 = RR x RS0` shards output features,
            `RR = RS0 x S0R` input features, `S0R = S0R x RR_0` the first dimension of the batch. On two axes,
            0 is the data-parallel ranks, each with rows of the batch, and 1 is `tp`: `S0S1 = S0R x RS1_0` is
            then the first of the three.
        modules: pattern of FQNs of linears; `*` stands for any characters. What has a weight in common with
            others, such as a tied head, is not split: it stays replicated, and the record's plan says why. A
            pattern that matches nothing else is refused.
    """

    candidate: str = "RS0 = RR x RS0"
    modules: str = "*"

    def __post_init__(self) -> None:
        check_simple_fields("shard", self)

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> shard_plan.ShardPlan:
        """Return the plan; as `Sharding.plan`."""
        graph = graph_building.model_graph(model, sample, axis, A100)
        matching = self._matching(graph)
        kept_whole = self._kept_whole(graph, matching, axis)
        names = {fqn: self._name(fqn, node, axis) for fqn, node in matching.items() if fqn not in kept_whole}
        if any(node.is_random or (node.leaf is not None and node.leaf.split) for node in graph.nodes):
            # what it is compared with, which must be right itself
            graph = choices.with_random_numbers_of(graph, choices.megatron(graph))
        choice = solver.cheapest(choices.restricted(graph, partial(_allows, names)), solver.Limits())
        if choice is None:
            problem = f"{self.candidate!r} would draw other random numbers than shard=none"
            raise StrategyError("shard.candidate", f"{problem}; use model.dropout=0, or other modules")
        return replace(shard_plan.ShardPlan.of(graph, choice, axis.ranks), kept_whole=kept_whole)

    def _matching(self, graph: ModelGraph) -> dict[str, Node]:
        linears = {
            node.leaf.fqn: node
            for node in graph.nodes
            if node.leaf is not None and isinstance(node.leaf.module, torch.nn.Linear)
        }
        matching = {fqn: node for fqn, node in linears.items() if fnmatchcase(fqn, self.modules)}
        if not matching:
            some = ", ".join(list(linears)[:4]) + (", ..." if len(linears) > 4 else "")  # noqa: PLR2004 (enough to see how they are named)
            problem = f"{self.modules!r} matches no linear"
            raise StrategyError("shard.modules", f"{problem}; there are {some or 'none'}")
        return matching

    def _kept_whole(
        self, graph: ModelGraph, matching: Mapping[str, Node], axis: TensorAxis
    ) -> dict[str, str]:
        """Return why some of the linears that match lack the candidate: their weight cannot be split.

        Raises:
            StrategyError: that holds for all of them.
        """
        found = {
            fqn: graph.kept_whole[fqn]
            for fqn, node in matching.items()
            if fqn in graph.kept_whole and self._found(node, axis) is None
        }
        if matching.keys() == found.keys():
            fqn, reason = next(iter(found.items()))
            problem = f"{fqn!r} {reason}, so that it is not split, and {self.modules!r} matches nothing else"
            raise StrategyError("shard.modules", f"{problem}; use a candidate of rows, S0R = S0R x RR_0")
        return found

    def _found(self, node: Node, axis: TensorAxis) -> str | None:
        """Return the candidate of a linear on `tp`, if it has the one that is asked for."""
        on_tp = _on_tp(node)
        if self.candidate in on_tp:
            return self.candidate
        return _on_both(node).get(self.candidate) if axis.data_ranks > 1 else None

    def _name(self, fqn: str, node: Node, axis: TensorAxis) -> str:
        """Return the candidate of a linear on `tp`. Raises StrategyError: it has none of that name."""
        found = self._found(node, axis)
        if found is not None:
            return found
        names, on_both = list(_on_tp(node)), _on_both(node)
        problem = f"{fqn!r} has no candidate {self.candidate!r}"
        if self.candidate in on_both:
            problem += ", because there are no data-parallel ranks to be axis 0; use mesh=shard2_tp2"
        elif axis.data_ranks > 1:
            names = [*dict.fromkeys((*names, *on_both))]
            problem += " on axes 0, the data-parallel ranks with rows of their own, and 1, tp, or on tp alone"
        raise StrategyError("shard.candidate", f"{problem}; it has: {', '.join(names)}")


def _on_tp(node: Node) -> dict[str, Label]:
    """Return what the candidates of a linear shard, by their name on `tp`."""
    return {
        option.candidate.name: option.candidate.choice
        for option in node.options
        if option.candidate is not None
    }


def _on_both(node: Node) -> dict[str, str]:
    """Return the names of candidates on `tp`, by their name on a mesh with an axis of data-parallel ranks."""
    leaf = node.leaf
    assert leaf is not None
    return {_name_on_both(leaf, choice): name for name, choice in _on_tp(node).items() if choice is not None}


def _name_on_both(leaf: LeafModule, choice: Label) -> str:
    """Return the name of a candidate on `tp`, with an axis of data-parallel ranks."""
    operation = module_operations.module_operation(leaf.module, leaf.input.shape)
    return operation.naming(operation, ("b0", choice))


def _allows(names: Mapping[str, str], leaf: LeafModule, option: NodeOption) -> bool:
    assert option.candidate is not None
    if leaf.fqn in names:
        return option.candidate.name == names[leaf.fqn]
    return option.candidate.choice is None
