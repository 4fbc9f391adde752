"""Decisions: a schedule without its graph, which applies to any graph of the same operators.

Other sequence lengths and most batch sizes change shapes but not operators, so they need no second search.
Decisions are numbers and words: a file can hold them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from torch import fx

from strategies.chunk.flow.chunk_region import ChunkRegion
from strategies.chunk.flow.chunk_rules import is_cheap, is_never
from strategies.chunk.flow.grow_region import RegionGrower, seeds_of
from strategies.chunk.flow.slice_inputs import slice_inputs
from strategies.chunk.loops.backward import differentiable
from strategies.chunk.loops.buffer_reuse import BufferReuse
from strategies.chunk.loops.gradients_ahead import summed_up
from strategies.chunk.loops.loop import Loop, make_loop
from strategies.chunk.loops.schedule import Schedule

Structure: TypeAlias = str
"""A digest, equal for graphs of the same operators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopDecision:
    """One loop; nodes are positions in the graph.

    Fields:
        members: operators of the region.
        inputs: what the loop takes.
        window: operators that the region was grown from.
        may_copy: whether cheap ones of these may run twice.
        may_overlap: whether pictures may be cut inside.
        has_sliced_inputs: whether the region takes parts of values.
        seed: operator that the region grew from.
        way: which of the ways to begin there.
        length: positions in a chunk.
        into: each output with the input whose buffer it reuses, or `None`.
        kept: members whose values backward takes.
        is_ahead: whether forward makes the gradients.
    """

    members: tuple[int, ...]
    inputs: tuple[int, ...]
    window: tuple[int, ...]
    may_copy: bool
    may_overlap: bool
    has_sliced_inputs: bool
    seed: int
    way: tuple[str | int, ...]
    length: int
    into: tuple[tuple[int, int | None], ...]
    kept: tuple[int, ...]
    is_ahead: bool


Decisions: TypeAlias = tuple[int | LoopDecision, ...]
"""What runs in which order: positions of operators, and loops."""


def structure_of(graph: fx.Graph) -> Structure:
    """Return what `graph` has in common with graphs of the same operators on other shapes."""
    told = [
        (node.op, str(node.target), tuple(source.name for source in node.all_input_nodes))
        for node in graph.nodes
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def decisions_of(schedule: Schedule) -> Decisions:
    """Return the decisions of a schedule."""
    at = {node: index for index, node in enumerate(schedule.graph.nodes)}

    def decision(loop: Loop) -> LoopDecision:
        """Return a loop in numbers of positions, as equal scopes share them."""
        region, seed = loop.region, loop.region.seed
        return LoopDecision(
            members=tuple(at[node] for node in region.members),
            inputs=tuple(dict.fromkeys(at[operand.node] for operand in loop.inputs)),
            window=tuple(at[node] for node in region.window),
            may_copy=region.may_copy is is_cheap,
            may_overlap=region.may_overlap,
            has_sliced_inputs=region.has_sliced_inputs,
            seed=at[seed.node],
            way=seed.way,
            length=loop.length,
            into=tuple(
                (at[result.node], at[result.into] if result.into else None) for result in loop.outputs
            ),
            kept=tuple(at[each.node] for each in loop.keeps()),
            is_ahead=loop.ahead is not None,
        )

    return tuple(decision(item) if isinstance(item, Loop) else at[item] for item in schedule.items)


def decisions_to_json(decisions: Decisions) -> list[Any]:
    """Return decisions as JSON values."""
    return [asdict(item) if isinstance(item, LoopDecision) else item for item in decisions]


def decisions_from_json(held: Sequence[Any]) -> Decisions:
    """Return the decisions that `decisions_to_json` gave.

    Raises:
        KeyError, TypeError: it gave other ones.
    """
    return tuple(_loop_decision(item) if isinstance(item, Mapping) else int(item) for item in held)


def _loop_decision(held: Mapping[str, Any]) -> LoopDecision:
    """Return the decision that `asdict` gave, with tuples where JSON has lists."""
    values: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list | tuple) else each for name, each in held.items()
    }
    return LoopDecision(**{**values, "into": tuple((at, over) for at, over in held["into"])})


def reapplied(decisions: Decisions, plain: Schedule, donated: frozenset[fx.Node]) -> Schedule | None:
    """Return the schedule of the same decisions on another graph.

    Args:
        decisions: decisions on a graph of the same structure.
        plain: schedule of the other graph, without loops.
        donated: inputs of the graph whose buffers may be reused.

    Returns:
        `None` where a region does not grow as it did, because a dimension has become 1.
    """
    nodes = list(plain.graph.nodes)
    items: list[fx.Node | Loop] = []
    for index, item in enumerate(decisions):
        if not isinstance(item, LoopDecision):
            items.append(nodes[item])
            continue
        later = _used_by(decisions[index + 1 :], nodes)
        loop = _loop(item, nodes, later | set(plain.outputs), plain)
        if loop is None:
            return None
        items.append(loop)
    again, takeover = replace(plain, items=items), BufferReuse.of(plain, donated)
    for at, each in enumerate(items):
        if isinstance(each, Loop):  # another shape may be broadcast, and donations differ
            again.items = [*again.items[:at], takeover.checked(again, at), *again.items[at + 1 :]]
    return again


def _used_by(items: Sequence[int | LoopDecision], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the values that items use."""
    used: set[fx.Node] = set()
    for item in items:
        if isinstance(item, LoopDecision):
            used.update(nodes[position] for position in item.inputs)
        else:
            used.update(nodes[item].all_input_nodes)
    return used


def _loop(
    decision: LoopDecision, nodes: Sequence[fx.Node], outside: set[fx.Node], plain: Schedule
) -> Loop | None:
    """Return the loop that was decided for an equal scope, `None` where it does not fit this one."""
    region = _region(decision, nodes)
    if region is None or region.members != [nodes[position] for position in decision.members]:
        return None
    kept = frozenset(nodes[position] for position in decision.kept if plain.storages.has_gradients)
    loop = make_loop(region, outside, decision.length, plain.storages, kept)
    if loop is not None and decision.is_ahead and plain.storages.has_gradients:
        loop = replace(loop, ahead=summed_up(loop, differentiable(plain.graph)))
    into = {nodes[at]: position for at, position in decision.into}
    if loop is None or not into.keys() >= {result.node for result in loop.outputs}:
        return None
    loop = loop.with_length(min(decision.length, loop.size))
    places = (into[result.node] for result in loop.outputs)
    outputs = (
        replace(result, into=None if position is None else nodes[position])
        for result, position in zip(loop.outputs, places, strict=True)
    )
    return replace(loop, outputs=tuple(outputs))


def _region(decision: LoopDecision, nodes: Sequence[fx.Node]) -> ChunkRegion | None:
    """Return the region that grows from the seed of a decision on another graph."""
    seed = next((each for each in seeds_of(nodes[decision.seed]) if each.way == decision.way), None)
    if seed is None:
        return None
    window = [nodes[position] for position in decision.window]
    may_copy = is_cheap if decision.may_copy else is_never
    region = RegionGrower(window, may_copy, may_overlap=decision.may_overlap).region(seed)
    return slice_inputs(region) if region is not None and decision.has_sliced_inputs else region
