"""A sharding plan: how every leaf module of a model runs on one mesh axis, and what that communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strategies.shard.candidates.layout import Shape, local_shape
from strategies.shard.candidates.redistribution import Collective
from strategies.shard.model.graph import ModelGraph, PythonState
from strategies.shard.model.module_options import LeafModule, ModuleCandidate, NodeOption
from strategies.shard.model.placement_state import WHOLE


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModule:
    """A leaf module and its option.

    Fields:
        fqn: plain FQN of the module.
        option: option by which it runs; it has a candidate.
        whole_shape: shape of its whole input.
        shape: shape of its input on one rank.
        output_shape: shape of its output on one rank.
    """

    fqn: str
    option: NodeOption
    whole_shape: Shape
    shape: Shape
    output_shape: Shape

    @property
    def candidate(self) -> ModuleCandidate:
        """The candidate of its option."""
        assert self.option.candidate is not None
        return self.option.candidate

    @property
    def is_plain(self) -> bool:
        """True if it runs as it would without a plan."""
        moves = (self.option.entering, self.option.leaving, self.candidate.finish)
        is_moved = any(move.forward or move.backward for move in moves)
        parameters = self.candidate.parameters.values()
        return not is_moved and not any(held.reduction or held.placement.is_shard() for held in parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedParameter:
    """A parameter that functions read; each rank computes one summand of its gradient.

    Fields:
        fqn: plain FQN of the parameter.
        option: option that makes its gradient whole.
    """

    fqn: str
    option: NodeOption


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """The decisions of a sharding strategy about one model.

    Fields:
        ranks: number of ranks on the mesh axis.
        modules: leaf modules, in the order in which they run.
        python: what the planned forward asked of Python; `None` where nothing was recorded.
        seconds: time of one rank in one step: FLOPs of linears and attention, and all collectives.
        memory_bytes: bytes on one rank: parameters, their gradients, and the outputs of all calls.
        kept_whole: reasons why modules that were asked to be split are replicated, by FQN.
        shapes: shapes of the model's parameters, by FQN; a tied one has one name.
    """

    ranks: int
    modules: tuple[PlacedModule, ...]
    seconds: float
    memory_bytes: int
    parameters: tuple[PlacedParameter, ...] = ()
    python: PythonState | None = None
    kept_whole: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: ModelGraph, choice: Sequence[NodeOption], ranks: int) -> ShardPlan:
        """Return the plan of a graph, the nodes of which run by `choice`."""
        chosen = tuple(zip(graph.nodes, choice, strict=True))
        return cls(
            ranks=ranks,
            modules=tuple(
                _placed(node.leaf, option, ranks) for node, option in chosen if node.leaf is not None
            ),
            parameters=tuple(
                PlacedParameter(fqn=node.parameter, option=option)
                for node, option in chosen
                if node.parameter is not None and option.output != WHOLE
            ),
            seconds=sum(option.seconds for option in choice),
            memory_bytes=graph.resident_bytes + sum(option.memory_bytes for option in choice),
            python=graph.python,
            shapes=graph.shapes,
        )

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of one step, by module."""
        options = [each.option for each in self.modules] + [each.option for each in self.parameters]
        return tuple(collective for option in options for collective in option.collectives)

    @property
    def communicated_bytes(self) -> int:
        """Payload of all collectives of one step."""
        return sum(collective.payload_bytes for collective in self.collectives)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as it stands in a record."""
        kept_whole = {"kept_whole": dict(self.kept_whole)} if self.kept_whole else {}
        return kept_whole | {
            "ranks": self.ranks,
            "candidates": {placed.fqn: placed.candidate.name for placed in self.modules},
            "resharding": [
                *(described for placed in self.modules for described in _resharding(placed)),
                *(_summed(placed) for placed in self.parameters),
            ],
            "collectives": _summary(self.collectives),
            "communicated_bytes": self.communicated_bytes,
            "memory_bytes": self.memory_bytes,
            "seconds": self.seconds,
        }


def _placed(leaf: LeafModule, option: NodeOption, ranks: int) -> PlacedModule:
    (entered,) = option.inputs
    return PlacedModule(
        fqn=leaf.fqn,
        option=option,
        whole_shape=leaf.input.shape,
        shape=local_shape(leaf.input.shape, (entered.value,), (ranks,)),
        output_shape=local_shape(leaf.output.shape, (option.output.value,), (ranks,)),
    )


def _resharding(placed: PlacedModule) -> Iterable[dict[str, str]]:
    """Yield the changes of state at a module, besides those that its candidate is made of."""
    option, candidate = placed.option, placed.candidate
    ends = (("input", option.inputs[0], candidate.input), ("output", candidate.output, option.output))
    for operand, source, target in ends:
        if source != target:
            yield {"module": placed.fqn, "operand": operand, "from": str(source), "to": str(target)}


def _summed(placed: PlacedParameter) -> dict[str, str]:
    module, _, name = placed.fqn.rpartition(".")
    return {"module": module, "operand": name, "from": str(WHOLE), "to": str(placed.option.output)}


def _summary(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    counts = Counter((each.phase, each.kind, each.payload_bytes) for each in collectives)
    return [
        {"phase": phase, "kind": kind, "payload_bytes": payload_bytes, "count": count}
        for (phase, kind, payload_bytes), count in sorted(counts.items(), reverse=True)
    ]
