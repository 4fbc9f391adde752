"""Scopes: which modules have a forward of their own, how they are told apart, and who decides for each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from strategies.chunk.loops.backward import TrainingPass, saved_storages
from strategies.chunk.loops.decisions import Decisions, Structure, reapplied, structure_of
from strategies.chunk.loops.loop import Schedule
from strategies.chunk.planning.forward_search import ForwardSearch, unchunked_schedule
from strategies.chunk.planning.training_search import TrainingSearch
from strategies.chunk.running.chunked_forward import ChunkedForward, ChunkProgram, install
from strategies.estimate.liveness import Storages
from strategies.estimate.operator_cost import Machine
from strategies.regions.blocks import plain_class


def scopes_of(model: nn.Module) -> frozenset[str]:
    """Return the FQNs of the blocks of `model`: what its outermost lists of modules hold."""
    found: set[str] = set()
    for fqn, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not any(
            fqn == block or fqn.startswith(f"{block}.") for block in found
        ):
            found.update(
                f"{fqn}.{name}".lstrip(".")
                for name, child in module.named_children()
                if any(child.children())
            )
    return frozenset(found)


def signature_of(graph: fx.Graph) -> Hashable:
    """Return what graphs have in common that one schedule suits."""
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


def inputs_at(graph: fx.Graph, positions: frozenset[int]) -> frozenset[fx.Node]:
    """Return the tensor inputs of `graph` at some positions."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return frozenset(inputs[position] for position in positions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeScheduler:
    """Decides for the forward of one scope, on all shapes of its inputs.

    Fields:
        decisions: what was decided, by structure of the graph.
        goal_bytes: the peak to keep in forwards of another structure.
        share: the part of its memory that a scope of another structure may have in training; `None` for plans
            without backward.
        sort: what scopes whose programs are the same have in common.
        recomputes: whether forward runs again in backward, and nothing is saved of it but its inputs.
        machine: whose time is saved.
    """

    decisions: Mapping[Structure, Decisions]
    goal_bytes: int
    share: float | None
    sort: Hashable
    recomputes: bool
    machine: Machine

    def schedule(self, graph: fx.Graph, donated: frozenset[int]) -> Schedule:
        """Return the schedule of a graph of the scope, whose inputs at `donated` may be overwritten."""
        plain = unchunked_schedule(graph, Storages.of_graph(graph), {})
        inputs = inputs_at(graph, donated)
        known = self.decisions.get(structure_of(graph))
        again = None if known is None else reapplied(known, graph, plain, inputs)
        if again is not None:
            return again
        if self.share is None:
            return ForwardSearch(plain, self.machine, inputs).fit(self.goal_bytes)
        first = TrainingPass(schedule=plain, saves=saved_storages(graph), calls={})
        options = TrainingSearch(first, self.machine).path()
        allowed = options[0].weight_bytes * self.share
        fitting = (option for option in options if option.weight_bytes <= allowed)
        return next(fitting, options[-1]).planned.schedule


def install_all(
    model: nn.Module,
    schedulers: Mapping[str, ScopeScheduler],
    recorded: dict[type[nn.Module], dict[Hashable, ChunkProgram]] | None = None,
) -> None:
    """Let the scopes of a plain `model` run as their schedulers say.

    Args:
        model: plain.
        schedulers: by FQN.
        recorded: programs of scopes of the same classes under other schedulers; what they have recorded is
            not recorded again.
    """
    recorded = {} if recorded is None else recorded
    inner = frozenset(fqn for fqn in schedulers if fqn)
    alike: dict[Hashable, dict[Hashable, ChunkProgram]] = {}
    for fqn, scheduler in schedulers.items():
        module = model.get_submodule(fqn)
        forward = ChunkedForward(
            scheduler=scheduler,
            scopes=frozenset() if fqn else inner,
            alike=alike.setdefault((plain_class(module), scheduler.sort), {}),
            recorded=recorded.setdefault(plain_class(module), {}),
        )
        install(module, forward)
