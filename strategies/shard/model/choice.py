"""Choices of options for a graph: Megatron's, and what any other one must keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from strategies.errors import StrategyError
from strategies.shard.model.graph import ModelGraph
from strategies.shard.model.module_options import Leaf, Option
from strategies.shard.model.solver import Choice, Limits, cheapest, first_stop
from strategies.shard.model.state import WHOLE

Rule: TypeAlias = Callable[[Leaf, Option], bool]
"""Whether a leaf module may run by an option."""

_CHOICES = {"column": "n", "row": "k"}


def restricted(graph: ModelGraph, rule: Rule) -> ModelGraph:
    """Return `graph` with those options of leaf modules that `rule` allows."""
    return replace(
        graph,
        nodes=tuple(
            node
            if (leaf := node.leaf) is None
            else replace(node, options=tuple(option for option in node.options if rule(leaf, option)))
            for node in graph.nodes
        ),
    )


def megatron(graph: ModelGraph, *, where: str) -> Choice:
    """Return Megatron's choice: column before row where the model allows it, everything else whole.

    Args:
        graph: of the model.
        where: configuration path of the strategy, for messages.

    Raises:
        StrategyError: the model has no such linears, or its code between them is not known to run on shards.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    if not any(node.leaf is not None and node.leaf.split for node in graph.nodes):
        some = next((f"{fqn!r} {reason}" for fqn, reason in graph.unsplit.items()), "it has none")
        raise StrategyError(where, f"needs linears that the model's tensor parallel plan splits; {some}")
    choice = cheapest(restricted(graph, _is_megatron), Limits())
    if choice is None:
        raise StrategyError(where, _stopped(graph))
    return choice


def with_random_numbers_of(graph: ModelGraph, choice: Choice) -> ModelGraph:
    """Return `graph` where what draws random numbers has the local shapes that it has in `choice`.

    Another shape would draw other numbers, and nothing could be compared.
    """
    return replace(
        graph,
        nodes=tuple(
            replace(
                node,
                options=tuple(option for option in node.options if option.output.dim == chosen.output.dim),
            )
            if node.is_random
            else node
            for node, chosen in zip(graph.nodes, choice, strict=True)
        ),
    )


def _stopped(graph: ModelGraph) -> str:
    """Return what stops a shard of features on its way from one linear to the next."""
    problem = (
        "the code between the linears that the model's tensor parallel plan splits is not known to run on a "
        "shard of features"
    )
    for fqn, reason in graph.unsplit.items():
        return f"{problem}: {fqn!r} {reason}; use mesh.tp=1"
    stop = first_stop(restricted(graph, _is_megatron))
    if stop is None:
        return f"{problem}; use mesh.tp=1"
    sources = ", ".join(repr(graph.nodes[source].name) for source in stop.sources)
    return f"{problem}: {stop.place or repr(stop.name)} reads {sources}; use mesh.tp=1"


def _is_megatron(leaf: Leaf, option: Option) -> bool:
    way = option.way
    assert way is not None
    states = option.inputs[0], option.output
    if leaf.split is None:
        return way.choice is None and states == (WHOLE, WHOLE)
    between = (WHOLE, way.output) if leaf.split == "column" else (way.input, WHOLE)
    return way.choice == _CHOICES[leaf.split] and states == between
