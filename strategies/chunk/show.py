"""Plans as text: the code with its loops, and the bytes operator by operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from strategies.base import PlannedStep
from strategies.chunk.flow.batch_flow import BatchFlow
from strategies.chunk.loops.loop import Loop
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.planning.chunk_plan import ChunkPlan
from strategies.chunk.planning.rehearsal import Rehearsal
from strategies.chunk.running.runtime import ChunkLoop
from strategies.chunk.running.schedule_code import lower
from strategies.regions.blocks import unwrapped
from strategies.tracing.code_text import code_text

_MODULES = re.compile(r"\bstrategies_chunk_(?:running|flow)_(runtime|axes|row_window|windowed_rows)_")
_WHOLE_DIMENSIONS = re.compile(r"(Axis\(\d+, \d+, \d+), 1, 0, 0, 0, 0\)")
_ABOUT = """Bytes alive while each operator of one forward runs, by sort of scope. What was alive before it,
such as its inputs and what other scopes keep for backward, is not among them."""


def code_view(plan: ChunkPlan, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> str:
    """Return a summary, the regions, and the code of each sort of scope with its loops."""
    parts = [_summary(plan)]
    for names, schedule in _sorts(plan, model, sample, step):
        code = lower(schedule)
        parts.append(f"# {names}\n{_plain(code_text(code.module))}")
        parts += [
            f"# loop_{index}: {loop.size} in chunks of {loop.length}; behind its lines stand the shapes of "
            f"all chunks together\n{_plain(code_text(loop.body))}"
            for index, loop in enumerate(code.loops)
            if isinstance(loop, ChunkLoop)
        ]
    return "\n\n".join(parts)


def memory_view(plan: ChunkPlan, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep) -> str:
    """Return the bytes alive in forward at each operator, before and after chunking."""
    parts = [_summary(plan), _ABOUT]
    for names, schedule in _sorts(plan, model, sample, step):
        plain = Schedule.of_graph(schedule.graph)
        parts += [f"# {names}, before\n" + _table(plain), f"# {names}, after\n" + _table(schedule)]
    return "\n\n".join(parts)


def _plain(code: str) -> str:
    """Return code with short names of the modules that functions come from, and without usual values."""
    return _WHOLE_DIMENSIONS.sub(r"\1)", _MODULES.sub(r"\1.", code))


def _summary(plan: ChunkPlan) -> str:
    """Return bytes, time and loops of a plan, a line each."""
    lines = [
        f"activations: {plan.unchunked_peak_bytes} bytes as it is, {plan.predicted_peak_bytes} bytes planned",
        f"budget: {'the smallest' if plan.budget_bytes is None else f'{plan.budget_bytes} bytes'}",
        f"time: {plan.predicted_slowdown:.2f} x, by the cost model",
    ]
    if plan.batch is not None:
        lines.append(
            f"the whole model: chunks of {plan.batch} from its batch, in each of which what follows runs"
        )
    if plan.recomputed:
        lines.append(f"computed again in backward: {', '.join(plan.recomputed)}")
    for region in plan.regions:
        along = "a sum" if region.dimension is None else f"dimension {region.dimension} of {region.value}"
        scope = region.scope or "(model)"
        lines.append(
            f"{scope}: {len(region.operators)} operators, {region.chunks} chunks of {region.chunk_size} "
            f"from {region.size}, along {along}"
            + (f"; kept for backward: {', '.join(region.kept)}" if region.kept else "")
            + ("; forward makes the gradients" if region.is_ahead else "")
        )
    return "\n".join(lines)


def _sorts(
    plan: ChunkPlan, model: nn.Module, sample: tuple[Any, ...], step: PlannedStep
) -> Iterator[tuple[str, Schedule]]:
    """Yield each sort of scope once, with the names of all scopes of the sort."""
    rehearsal = Rehearsal.of(unwrapped(model), sample, step, training=plan.training)
    graphs = rehearsal.recorded("chunk")
    flow = None if plan.batch is None else BatchFlow.of(graphs)
    if plan.batch is not None and flow is not None:
        graphs = rehearsal.of_part(flow, plan.batch).recorded("chunk")
    sorts: dict[str, tuple[list[str], Schedule]] = {}
    for graph in graphs:
        scheduler = plan.schedulers.get(graph.fqn)
        if scheduler is None:
            continue
        schedule = scheduler.schedule(graph.graph, frozenset())
        text = code_text(lower(schedule).module)
        sorts.setdefault(text, ([], schedule))[0].append(graph.fqn or "(model)")
    for names, schedule in sorts.values():
        yield ", ".join(dict.fromkeys(names)), schedule


def _table(schedule: Schedule) -> str:
    rows = zip(schedule.items, schedule.profile().live_bytes, strict=True)
    return "\n".join(f"{live:>16,}  {_name(item)}" for item, live in rows)


def _name(item: fx.Node | Loop) -> str:
    if isinstance(item, Loop):
        members = item.region.members
        return f"loop of {item.chunks} x {item.length}: {members[0].name} ... {members[-1].name}"
    return str(item.name)
