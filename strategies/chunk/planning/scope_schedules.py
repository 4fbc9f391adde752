"""Scopes of a model: how they are told apart, their schedules, and what decides for each when it runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx

from strategies.chunk.loops.backward import SavedFate, TrainingPass, saved_storages
from strategies.chunk.loops.decisions import Decisions, Structure, decisions_of, reapplied, structure_of
from strategies.chunk.loops.loop import Loop
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.planning.forward_search import ForwardSearch
from strategies.chunk.planning.training_search import TrainingSearch
from strategies.estimate.machine import Machine
from strategies.tracing.scope_graph import ScopeGraph, is_opaque

_CALL_S = 1e-4
_READ_S = 2.5e-6
"""Seconds that the call of a program takes besides its operators, and that it takes to compare each read.

Calibrated on one core of a server processor, by calls of programs that do nothing: 1.5 to 2.6 us a read.
Fixed for all machines: it is Python's time, and plans must be the same on every rank.
"""

ScopeKind: TypeAlias = tuple[Hashable, SavedFate]
"""Equal for scopes with the same schedules: signature of the graph, and where AC leaves saved tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRegion:
    """Operators that run as one loop.

    Fields:
        scope: FQN of the module whose forward holds the operators; `""` is the model.
        operators: names in the listing of the scope, in order.
        dimension: dimension of `value` that is cut; `None` for a sum.
        value: name of the value that the region grew from.
        size: positions of the chunk axis.
        chunk_size: positions in a chunk; the last chunk may have less.
        chunks: how often the operators run.
        kept: operators whose results forward keeps, so that backward does not compute them again.
        is_ahead: whether forward makes the gradients, so that backward computes nothing again.
    """

    scope: str
    operators: tuple[str, ...]
    dimension: int | None
    value: str
    size: int
    chunk_size: int
    chunks: int
    kept: tuple[str, ...] = ()
    is_ahead: bool = False

    @classmethod
    def of(cls, scope: str, loop: Loop) -> PlannedRegion:
        """Return the description of a loop in the forward of `scope`."""
        seed = loop.region.seed
        return cls(
            scope=scope,
            operators=tuple(node.name for node in loop.region.members),
            dimension=None if seed.axis is None else seed.axis.dim,
            value=seed.node.name,
            size=loop.size,
            chunk_size=loop.length,
            chunks=loop.chunks,
            kept=tuple(operand.node.name for operand in loop.keeps()),
            is_ahead=loop.ahead is not None,
        )


class ModelScopes:
    """The recorded scopes of one model; scopes of one kind share their schedules.

    Args:
        graphs: graphs of the scopes, inner ones first, the model's last.
        machine: device whose time is saved.
        around: where AC leaves saved tensors of scopes, by FQN.

    Attributes:
        kinds: kind of each graph.
        plain: schedule without loops, by kind.
        calls: calls of inner scopes in the model's graph, in the order of `graphs`.
        seconds: time of all forwards without loops.
        checks_s: time in which the programs of a forward find that they still fit the model.
    """

    def __init__(
        self, graphs: list[ScopeGraph], machine: Machine, around: Mapping[str, SavedFate] | None = None
    ) -> None:
        self.graphs = graphs
        self.machine = machine
        fates = [(around or {}).get(graph.fqn, SavedFate.KEPT) for graph in graphs]
        self.kinds: list[ScopeKind] = [
            (signature_of(graph.graph), fate) for graph, fate in zip(graphs, fates, strict=True)
        ]
        first = dict(zip(reversed(self.kinds), reversed(graphs), strict=True))
        self.plain = {kind: Schedule.of_graph(first[kind].graph) for kind in dict.fromkeys(self.kinds)}
        self.root = graphs[-1].graph
        called = (node for node in self.root.nodes if node.op == "call_module")
        self.calls = [node for node in called if not is_opaque(node)]
        self.seconds = sum(self.plain[kind].seconds(machine) for kind in self.kinds)
        self.checks_s = checks_s(graphs)


def checks_s(graphs: Sequence[ScopeGraph], *, calls: int = 1, checks: int = 1) -> float:
    """Return the seconds in which the programs of some graphs find that what they have read is as it was.

    Args:
        graphs: graphs of a forward.
        calls: how often each program is called.
        checks: in how many of these calls it compares what it has read.
    """
    return sum(calls * _CALL_S + checks * _READ_S * len(graph.reads) for graph in graphs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSchedule:
    """The schedules of all scopes of a model.

    Fields:
        graphs: graphs of the scopes, inner ones first, the model's last.
        schedules: schedule of each graph.
        goals: peak in bytes that was asked of each schedule.
        recomputes: one truth value a scope, true where its forward runs again in backward.
        peak_bytes: highest total of the whole pass.
        slowdown: time of the pass / time without loops.
        peak_share: estimated peak / estimated peak without loops, for passes with a backward.
        batch: samples of a chunk of the loop over the batch, for which the graphs are; `None` without one.
    """

    graphs: list[ScopeGraph]
    schedules: list[Schedule]
    goals: list[int]
    recomputes: list[bool]
    peak_bytes: int
    slowdown: float
    peak_share: float | None = None
    batch: int | None = None

    def recomputed(self) -> tuple[str, ...]:
        """Return the FQNs of the scopes whose forward runs again in backward."""
        # a scope that is called twice runs as its last call says, as in `schedulers`
        latest = dict(zip((graph.fqn for graph in self.graphs), self.recomputes, strict=True))
        return tuple(fqn for fqn, recomputes in latest.items() if recomputes)

    def regions(self) -> tuple[PlannedRegion, ...]:
        """Return the loops, in the order of scopes and operators."""
        return tuple(
            PlannedRegion.of(graph.fqn, item)
            for graph, schedule in zip(self.graphs, self.schedules, strict=True)
            for item in schedule.items
            if isinstance(item, Loop)
        )

    def schedulers(self, machine: Machine) -> dict[str, ScopeScheduler]:
        """Return what decides for each scope from now on, by FQN."""
        found: dict[str, ScopeScheduler] = {}
        parts = zip(self.graphs, self.schedules, self.goals, self.recomputes, strict=True)
        for graph, schedule, goal, recomputes in parts:
            # identical blocks share one schedule, whose nodes are those of the first block's graph
            decided = decisions_of(schedule)
            earlier = found.get(graph.fqn)
            found[graph.fqn] = ScopeScheduler(
                decisions={structure_of(graph.graph): decided, **(earlier.decisions if earlier else {})},
                goal_bytes=goal,
                kind=(signature_of(graph.graph), decided, goal, recomputes, earlier and earlier.kind),
                share=self.peak_share,
                recomputes=recomputes,
                machine=machine,
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeScheduler:
    """Decides for the forward of one scope, whatever the shapes of its inputs.

    Fields:
        decisions: what was decided, by structure of the graph.
        goal_bytes: peak to keep in forwards of another structure.
        share: share of its memory that a scope of another structure may have in training; `None` for plans
            without backward.
        kind: equal for scopes whose programs are the same.
        recomputes: true where forward runs again in backward, and only its inputs are saved.
        machine: device whose time is saved.
    """

    decisions: Mapping[Structure, Decisions]
    goal_bytes: int
    share: float | None
    kind: Hashable
    recomputes: bool
    machine: Machine

    def schedule(self, graph: fx.Graph, donated: frozenset[int]) -> Schedule:
        """Return the schedule of a graph of the scope, whose inputs at `donated` may be overwritten."""
        plain = Schedule.of_graph(graph)
        inputs = inputs_at(graph, donated)
        known = self.decisions.get(structure_of(graph))
        again = None if known is None else reapplied(known, plain, inputs)
        if again is not None:
            return again
        if self.share is None:
            return ForwardSearch(plain, self.machine, inputs).fit(self.goal_bytes)
        first = TrainingPass(schedule=plain, saves=saved_storages(graph), calls={})
        options = TrainingSearch(first, self.machine).path()
        allowed = options[0].weight_bytes * self.share
        fitting = (option for option in options if option.weight_bytes <= allowed)
        return next(fitting, options[-1]).planned.schedule


def inputs_at(graph: fx.Graph, positions: frozenset[int]) -> frozenset[fx.Node]:
    """Return the tensor inputs of `graph` at some positions."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return frozenset(inputs[position] for position in positions)


def signature_of(graph: fx.Graph) -> Hashable:
    """Return a value that is equal for graphs that one schedule suits."""
    return tuple(
        (
            node.op,
            node.name,
            str(node.target),
            repr(node.args),
            repr(node.kwargs),
            _shapes(node.meta.get("val")),
        )
        for node in graph.nodes
    )


def _shapes(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_shapes, value)) if isinstance(value, tuple | list) else None
