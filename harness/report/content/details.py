"""What the record of one trial says beyond its row in the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.content.columns import NOTHING, mark, notes
from harness.report.content.pareto import front
from harness.report.model.commands import command
from harness.report.model.document import Code, Line, Mark, Part, Table
from harness.report.model.number_words import Unit
from harness.report.model.sweep import Entry, Sweep

MOST_DETAILED = 200
"""Trials with details in a report: those that went wrong, those worth choosing, then the rest in order."""

_MOST_TENSORS = 8
_MOST_OPS = 6
_MOST_PLAN_LINES = 40
_ALLOCATOR = ("peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "workspace_bytes")

Row = tuple[Line, Line]


def detailed(sweep: Sweep) -> tuple[Entry, ...]:
    """Return the trials that have details, in the order of the sweep."""
    if len(sweep.entries) <= MOST_DETAILED:
        return sweep.entries
    best = {point.entry.trial_id for group in sweep.by_setting.values() for point in front(group).best}

    def rank(entry: Entry) -> tuple[bool, bool]:
        went_wrong = entry.record.status != "ok" or entry.record.verdict in {"differs", "inert"}
        return not went_wrong, entry.trial_id not in best

    chosen = {entry.trial_id for entry in sorted(sweep.entries, key=rank)[:MOST_DETAILED]}
    return tuple(entry for entry in sweep.entries if entry.trial_id in chosen)


def details(entry: Entry) -> Table:
    """Return the details of a trial, a row a fact; its key is that of the trial."""
    return Table(
        key=f"trial-{entry.trial_id}",
        title=entry.name,
        columns=("what", "value"),
        rows=tuple(_rows(entry)),
        is_folded=True,
    )


def _rows(entry: Entry) -> Iterator[Row]:
    record = entry.record
    yield ("ended",), (Mark(text=record.status), ", ", mark(entry), f", {record.finished_at}")
    for note in notes(record):
        yield ("note",), (note,)
    line = command(record.experiment)
    if line is not None:
        yield ("command",), (Code(text=line),)
    if record.error is not None and record.error.log:
        yield ("log",), (Code(text=record.error.log),)
    yield from _parity(entry)
    yield from _memory(entry)
    yield from _work(entry)
    yield from _time(entry)
    if record.plan is not None:
        yield ("plan",), (Code(text=_plan(record.plan)),)


def _parity(entry: Entry) -> Iterator[Row]:
    if entry.record.parity is None:
        return
    losses = [
        entry.number(f"parity/losses/{step}", Unit.VALUE) for step in range(len(entry.record.parity.losses))
    ]
    yield ("loss after each step",), _listed([(loss,) for loss in losses if loss is not None])


def _memory(entry: Entry) -> Iterator[Row]:
    memory = entry.record.memory
    if memory is None:
        return
    peak = entry.number("memory/peak_bytes", Unit.BYTES) or NOTHING
    yield ("peak",), (peak, f" in {memory.peak_phase}, in ", Code(text=memory.peak_module))
    ranks = [
        (number,)
        for index in range(len(memory.by_rank))
        if (number := entry.number(f"memory/by_rank/{index}/peak_bytes", Unit.BYTES)) is not None
    ]
    if len(ranks) > 1:
        yield ("peak by rank",), _listed(ranks)
    if memory.allocator is not None:
        numbers = [
            (number, f" {name.removesuffix('_bytes').replace('_', ' ')}")
            for name in _ALLOCATOR
            if (number := entry.number(f"memory/allocator/{name}", Unit.BYTES)) is not None
        ]
        yield ("allocator",), (f"{memory.allocator.source}: ", *_listed(numbers))
    if memory.host_peak_bytes:
        yield ("host peak",), (entry.number("memory/host_peak_bytes", Unit.BYTES) or NOTHING,)
    for index, tensor in enumerate(memory.largest_saved[:_MOST_TENSORS]):
        size = entry.number(f"memory/largest_saved/{index}/bytes", Unit.BYTES) or NOTHING
        shape = "×".join(map(str, tensor.shape)) or "scalar"  # noqa: RUF001 (times)
        where = (" in ", Code(text=tensor.module)) if tensor.module else ()
        yield (
            ("largest saved" if index == 0 else "",),
            (size, " ", Code(text=tensor.op), *where, f", {shape} {tensor.dtype}"),
        )


def _work(entry: Entry) -> Iterator[Row]:
    work = entry.record.work
    if work is None:
        return
    ops = sorted(work.recomputed_ops, key=lambda name: -work.recomputed_ops[name])
    numbers = [
        (number, " ", Code(text=name))
        for name in ops[:_MOST_OPS]
        if (number := entry.number(f"work/recomputed_ops/{name}", Unit.COUNT)) is not None
    ]
    if numbers:
        more = f", and {len(ops) - _MOST_OPS} more operators" if len(ops) > _MOST_OPS else ""
        yield ("recomputed",), (*_listed(numbers), more) if more else _listed(numbers)
    if work.offloaded_bytes:
        yield ("offloaded",), (entry.number("work/offloaded_bytes", Unit.BYTES) or NOTHING,)
    if work.chunks:
        yield ("chunks",), (entry.number("work/chunks", Unit.COUNT) or NOTHING,)


def _time(entry: Entry) -> Iterator[Row]:
    names = (("median", "median"), ("p10", "10th percentile"), ("p90", "90th percentile"))
    numbers = [
        (number, f" {words}")
        for name, words in names
        if (number := entry.number(f"time/step_time_s/{name}", Unit.SECONDS)) is not None
    ]
    if numbers:
        yield ("step time",), _listed(numbers)
    energy = entry.number("time/energy_j", Unit.VALUE)
    if energy is not None:
        yield ("energy",), (energy, " J a step")


def _listed(items: Sequence[tuple[Part, ...]]) -> Line:
    """Return items with commas between them."""
    return tuple(part for index, item in enumerate(items) for part in ((", ", *item) if index else item))


def _plan(plan: Mapping[str, Any]) -> str:
    lines = list(_outline(plan, ""))
    kept = lines[:_MOST_PLAN_LINES]
    return "\n".join([*kept, f"… {len(lines) - len(kept)} more lines"] if len(kept) < len(lines) else kept)


def _outline(plan: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield what a part of a plan says on one line, and its parts below, indented."""
    below = {key: parts for key, value in plan.items() if (parts := _parts(value))}
    said = {key: value for key, value in plan.items() if key not in below and value not in (None, [], {})}
    if said:
        yield indent + ", ".join(f"{key} {_word(value)}" for key, value in said.items())
        indent += "  "
    for key, parts in below.items():
        yield f"{indent}{key}:"
        for part in parts:
            yield from _outline(part, f"{indent}  ")


def _parts(value: Any) -> list[Mapping[str, Any]]:
    found = [value] if isinstance(value, Mapping) else value
    is_outline = isinstance(found, list) and all(isinstance(each, Mapping) for each in found)
    return list(found) if is_outline else []


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
