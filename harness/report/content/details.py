"""Details of the record of one trial beyond its row in the results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from harness.records.record import Record
from harness.report.content.columns import number_cell
from harness.report.facts import quantities
from harness.report.facts.commands import command
from harness.report.facts.document import CodeText, Line, LinePart, Mark, Table
from harness.report.facts.quantities import Quantity
from harness.report.facts.sweep_records import Entry, SweepRecords

MOST_DETAILED = 200
"""Trials with details in a report: those that went wrong, those worth choosing, then the rest in order."""

_MOST_TENSORS = 8
_MOST_OPS = 6
_MOST_PLAN_LINES = 40

Fact = tuple[Line, Line]


def detailed(sweep: SweepRecords) -> tuple[Entry, ...]:
    """Return the trials that have details, in the order of the sweep."""
    if len(sweep.entries) <= MOST_DETAILED:
        return sweep.entries

    def rank(entry: Entry) -> tuple[bool, bool]:
        went_wrong = entry.record.status != "ok" or entry.record.verdict in {"differs", "inert"}
        return not went_wrong, entry.trial_id not in sweep.on_front

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


def _rows(entry: Entry) -> Iterator[Fact]:
    """Yield all facts about one trial, in their order on the page."""
    record = entry.record
    yield _fact("ended", Mark(text=record.status), ", ", entry.mark, f", {record.finished_at}")
    for note in entry.notes:
        yield _fact("note", note)
    yield from _model(record)
    line = command(record.experiment)
    if line is not None:
        yield _fact("command", CodeText(text=line))
    if record.error is not None and record.error.log:
        yield _fact("log", CodeText(text=record.error.log))
    if record.parity is not None:
        losses = [("", quantities.loss(step)) for step in range(len(record.parity.losses))]
        yield _fact("loss after each step", *_listed(_named_numbers(entry, losses)))
    yield from _memory(entry)
    yield from _work(entry)
    yield from _time(entry)
    if record.plan is not None:
        yield _fact("plan", CodeText(text=_plan(record.plan)))


def _fact(what: str, *value: LinePart) -> Fact:
    return (what,), value


def _model(record: Record) -> Iterator[Fact]:
    if record.trained is None:
        return
    changed = [f"{count} {what}" for what, count in record.trained.changed.items()]
    if changed:
        yield _fact("cast", ", ".join(changed))
    for remark in record.trained.remarks:
        yield _fact("model", remark)
    if record.trained.replaced:
        yield _fact("not the model's own", "; ".join(record.trained.replaced))


def _memory(entry: Entry) -> Iterator[Fact]:
    memory = entry.record.memory
    if memory is None:
        return
    peak = number_cell(entry, quantities.PEAK)
    yield _fact("peak", *peak, f" in {memory.peak_phase}, in ", CodeText(text=memory.peak_module))
    ranks = _named_numbers(entry, [("", quantities.rank_peak(index)) for index in range(len(memory.by_rank))])
    if len(ranks) > 1:
        yield _fact("peak by rank", *_listed(ranks))
    if memory.allocator is not None:
        numbers = _listed(_named_numbers(entry, quantities.ALLOCATOR))
        yield _fact("allocator", f"{memory.allocator.source}: ", *numbers)
    if memory.host_peak_bytes:
        yield _fact("host peak", *number_cell(entry, quantities.HOST_PEAK))
    for index, tensor in enumerate(memory.largest_saved[:_MOST_TENSORS]):
        size = number_cell(entry, quantities.largest_saved(index))
        shape = "×".join(map(str, tensor.shape)) or "scalar"  # noqa: RUF001 (times)
        where = (" in ", CodeText(text=tensor.module)) if tensor.module else ()
        what = "largest saved" if index == 0 else ""
        yield _fact(what, *size, " ", CodeText(text=tensor.op), *where, f", {shape} {tensor.dtype}")


def _work(entry: Entry) -> Iterator[Fact]:
    work = entry.record.work
    if work is None:
        return
    ops = sorted(work.recomputed_ops, key=lambda name: -work.recomputed_ops[name])
    numbers = [
        (number, " ", CodeText(text=name))
        for name in ops[:_MOST_OPS]
        if (number := entry.number(quantities.recomputed_op(name))) is not None
    ]
    if numbers:
        more = [f", and {len(ops) - _MOST_OPS} more operators"] if len(ops) > _MOST_OPS else []
        yield _fact("recomputed", *_listed(numbers), *more)
    if work.recomputed_seconds_share:  # records of before have none
        share = number_cell(entry, quantities.RECOMPUTED_SECONDS)
        yield _fact("seconds of these", *share, " of those of all other operators, on the machine of plans")
    if work.offloaded_bytes:
        yield _fact("offloaded", *number_cell(entry, quantities.OFFLOADED))
    if work.chunks:
        yield _fact("chunks", *number_cell(entry, quantities.CHUNKS))


def _time(entry: Entry) -> Iterator[Fact]:
    numbers = _named_numbers(entry, quantities.STEP_TIMES)
    if numbers:
        yield _fact("step time", *_listed(numbers))
    energy = entry.number(quantities.ENERGY)
    if energy is not None:
        yield _fact("energy", energy, " J a step")


def _named_numbers(entry: Entry, quantities: Iterable[tuple[str, Quantity]]) -> list[tuple[LinePart, ...]]:
    found = ((entry.number(quantity), name) for name, quantity in quantities)
    return [(number, f" {name}") if name else (number,) for number, name in found if number is not None]


def _listed(items: Sequence[tuple[LinePart, ...]]) -> Line:
    return tuple(part for index, item in enumerate(items) for part in ((", ", *item) if index else item))


def _plan(plan: Mapping[str, Any]) -> str:
    lines = list(_outline(plan, ""))
    kept = lines[:_MOST_PLAN_LINES]
    return "\n".join([*kept, f"… {len(lines) - len(kept)} more lines"] if len(kept) < len(lines) else kept)


def _outline(plan: Mapping[str, Any], indent: str) -> Iterator[str]:
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
