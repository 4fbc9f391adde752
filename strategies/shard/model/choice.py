"""Megatron's choice of options for a graph, and restrictions on other choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from strategies.base import StrategyError
from strategies.shard.model.graph import Choice, ModelGraph
from strategies.shard.model.module_options import LeafModule, NodeOption
from strategies.shard.model.placement_state import WHOLE
from strategies.shard.model.solver import Limits, cheapest, first_stop

OptionRule: TypeAlias = Callable[[LeafModule, NodeOption], bool]
"""Whether a leaf module may run by an option."""

_CHOICES = {"column": "n", "row": "k"}


def restricted(graph: ModelGraph, rule: OptionRule) -> ModelGraph:
    """Return `graph` with those options of leaf modules that `rule` allows."""

    def is_allowed(index: int, option: NodeOption) -> bool:
        leaf = graph.nodes[index].leaf
        return leaf is None or rule(leaf, option)

    return graph.keeping(is_allowed)


def megatron(graph: ModelGraph) -> Choice:
    """Return Megatron's choice: column before row where the model allows it, everything else whole.

    Raises:
        StrategyError: the model has no such linears, or its code between them is not known to run on shards.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    if not any(node.leaf is not None and node.leaf.split for node in graph.nodes):
        some = next((f"{fqn!r} {reason}" for fqn, reason in graph.unsplit.items()), "it has none")
        raise StrategyError("shard", f"needs linears that the model's tensor parallel plan splits; {some}")
    choice = cheapest(restricted(graph, _is_megatron), Limits())
    if choice is None:
        raise StrategyError("shard", _stopped(graph))
    return choice


def with_random_numbers_of(graph: ModelGraph, choice: Choice) -> ModelGraph:
    """Return `graph` where what draws random numbers has the local shapes that it has in `choice`.

    Another shape would draw other numbers, and nothing could be compared.
    """

    def is_allowed(index: int, option: NodeOption) -> bool:
        return not graph.nodes[index].is_random or option.output.dim == choice[index].output.dim

    return graph.keeping(is_allowed)


def _stopped(graph: ModelGraph) -> str:
    problem = (
        "the code between the linears that the model's tensor parallel plan splits is not known to run on a "
        "shard of features"
    )
    for fqn, reason in graph.unsplit.items():
        return f"{problem}: {fqn!r} {reason}; use shard=none and mesh.tp=1"
    stop = first_stop(restricted(graph, _is_megatron))
    if stop is None:
        return f"{problem}; use shard=none and mesh.tp=1"
    sources = ", ".join(repr(graph.nodes[source].name) for source in stop.sources)
    return f"{problem}: {stop.place or repr(stop.name)} reads {sources}; use shard=none and mesh.tp=1"


def _is_megatron(leaf: LeafModule, option: NodeOption) -> bool:
    candidate = option.candidate
    assert candidate is not None
    states = option.inputs[0], option.output
    if leaf.split is None:
        return candidate.choice is None and states == (WHOLE, WHOLE)
    is_column = leaf.split == "column"
    between = (WHOLE, candidate.output) if is_column else (candidate.input, WHOLE)
    return candidate.choice == _CHOICES[leaf.split] and states == between
