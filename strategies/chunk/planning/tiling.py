"""Plans that somebody else has made: modules in tiles of the sequence, as many as asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from torch import Tensor, fx, nn

from strategies.base import PlannedStep, StrategyError
from strategies.chunk.flow.chunk_region import ChunkRegion
from strategies.chunk.flow.chunk_rules import is_cheap, is_never
from strategies.chunk.flow.grow_region import RegionGrower, seeds_of
from strategies.chunk.flow.slice_inputs import slice_inputs
from strategies.chunk.loops.backward import saved_storages, with_backward
from strategies.chunk.loops.loop import Loop, make_loop
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.planning.chunk_plan import ChunkPlan, refuse_chunked
from strategies.chunk.planning.rehearsal import Rehearsal
from strategies.chunk.planning.scope_schedules import ModelSchedule, ModelScopes
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import is_view, machine_for
from strategies.regions import kept_modules
from strategies.regions.blocks import unwrapped
from strategies.tracing.scope_graph import ScopeGraph

_WHERE = "chunk.tiles"
_DIMENSIONS = 2  # positions and width


def tiled_plan(
    model: nn.Module, sample: tuple[Any, ...], step: PlannedStep, tiles: Mapping[str, int]
) -> ChunkPlan:
    """Return the plan in which modules run in tiles, forward and backward.

    Args:
        model: a plain model in training.
        sample: positional inputs.
        tiles: numbers of tiles by patterns of names of modules inside blocks.

    Raises:
        StrategyError: a pattern matches no module that runs, or a module mixes positions.
    """
    plain = unwrapped(model)
    refuse_chunked(plain)
    rehearsal = Rehearsal.of(plain, sample, step, training=True)
    graphs, machine = rehearsal.recorded(_WHERE), machine_for(rehearsal.device)
    whole_bytes = rehearsal.peak_bytes({})
    scopes = ModelScopes(graphs, machine, rehearsal.around())
    inside = {graph.fqn: _names(plain, graph.fqn) for graph in graphs if graph.fqn}
    kept_modules.refuse_unmatched(list(tiles), inside, where=_WHERE)
    schedules = [_tiled(graph, inside.get(graph.fqn, ()), tiles) for graph in graphs]
    planned = ModelSchedule(
        graphs=graphs,
        schedules=schedules,
        goals=[whole_bytes] * len(graphs),
        recomputes=[False] * len(graphs),
        peak_bytes=0,
        slowdown=_slowdown(scopes, schedules, machine),
        peak_share=1.0,
    )
    schedulers = planned.schedulers(machine)
    peak_bytes = rehearsal.peak_bytes(schedulers)
    return ChunkPlan(
        budget_bytes=None,
        predicted_peak_bytes=peak_bytes,
        unchunked_peak_bytes=whole_bytes,
        minimum_feasible_bytes=peak_bytes,
        predicted_slowdown=planned.slowdown,
        training=True,
        regions=planned.regions(),
        opaque=rehearsal.opaque,
        schedulers=schedulers,
    ).proven(model, sample, step=step)


def _names(model: nn.Module, scope: str) -> list[str]:
    return [name for name, _ in model.get_submodule(scope).named_modules() if name]


def _slowdown(scopes: ModelScopes, schedules: Sequence[Schedule], machine: Machine) -> float:
    """Return the time of forwards with loops, as a multiple of that without, by the cost model."""
    return sum(each.seconds(machine) for each in schedules) / scopes.seconds


def _tiled(graph: ScopeGraph, names: Sequence[str], tiles: Mapping[str, int]) -> Schedule:
    """Return the schedule of a block in which each module that a pattern matches is one loop."""
    schedule = Schedule.of_graph(graph.graph)
    items: list[fx.Node | Loop] = list(schedule.items)
    saves = saved_storages(graph.graph)
    for pattern, count in tiles.items():
        for name in kept_modules.matching([pattern], names):
            fqn = f"{graph.fqn}.{name}"
            own = [at for at, item in enumerate(items) if isinstance(item, fx.Node) and _is_in(item, fqn)]
            if not own:
                raise StrategyError(_WHERE, f"{fqn!r} is a module that forward does not call by itself")
            window = items[own[0] : own[-1] + 1]
            region = _region([each for each in window if isinstance(each, fx.Node)], fqn)
            rest = items[own[-1] + 1 :]
            used = {node for each in rest for node in _read(each)} | set(schedule.outputs)
            loop = make_loop(region, used, 1, schedule.storages)
            loop = loop and with_backward(loop, schedule.storages, saves)
            if loop is None:
                raise StrategyError(_WHERE, f"{fqn!r} gives what cannot be put together of its tiles")
            if count > loop.size:
                problem = f"is {count} for {fqn!r}, which has {loop.size} positions"
                raise StrategyError(_WHERE, f"{problem}; use at most {loop.size}")
            loop = loop.with_length(ceil(loop.size / count))
            items = [*items[: own[0]], *region.before, loop, *region.after, *rest]
    return replace(schedule, items=items)


def _is_in(node: fx.Node, fqn: str) -> bool:
    caller: str = node.meta.get("module", "")
    return node.op == "call_function" and (caller == fqn or caller.startswith(f"{fqn}."))


def _region(window: Sequence[fx.Node], fqn: str) -> ChunkRegion:
    """Return the operators of a module as one region, cut along the positions of what it gives.

    Raises:
        StrategyError: some of them cannot be cut.
    """
    last = window[-1]
    value = last.meta["val"]
    has_positions = isinstance(value, Tensor) and value.dim() >= _DIMENSIONS
    seeds = [seed for seed in seeds_of(last) if has_positions and seed.way == ("dim", value.dim() - 2)]
    for seed in seeds:
        for may_copy in (is_cheap, is_never):
            region = RegionGrower(window, may_copy).region(seed)
            if region is not None and all(map(is_view, (*region.before, *region.after))):
                return slice_inputs(region)
    problem = f"{fqn!r} mixes positions, or draws random numbers for them"
    raise StrategyError(_WHERE, f"{problem}, and cannot run in tiles; name a module inside of it")


def _read(item: fx.Node | Loop) -> Iterator[fx.Node]:
    if isinstance(item, fx.Node):
        yield from item.all_input_nodes
        return
    yield from (operand.node for operand in item.inputs)
