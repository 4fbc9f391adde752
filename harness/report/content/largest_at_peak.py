"""The largest tensors that live at the peak, of several trials side by side."""

from __future__ import annotations

from collections.abc import Iterator

from harness.records.measured import LivingTensor
from harness.report.facts import quantities
from harness.report.facts.document import NOTHING, CodeText, Line, LinePart, Table
from harness.report.facts.sweep_records import Entry, SweepRecords

MOST_BESIDE = 4
"""Trials in one table: the baseline, those worth choosing, then others in order."""

MOST_ROWS = 20

_Made = tuple[str, str, str, tuple[int, ...], str]


def largest_at_peak(sweep: SweepRecords) -> Table:
    """Return what the steps of the first trials have made and hold at their peaks, a row for each origin."""
    known = [entry for entry in sweep.entries if _living(entry)]
    known.sort(key=lambda entry: (not entry.is_baseline, entry.trial_id not in sweep.on_front))
    beside = known[:MOST_BESIDE]
    sizes: dict[_Made, int] = {}
    for tensor in (tensor for entry in beside for tensor in _living(entry)):
        sizes[_made(tensor)] = max(sizes.get(_made(tensor), 0), tensor.bytes)
    rows = sorted(sizes, key=lambda made: -sizes[made])[:MOST_ROWS]
    return Table(
        key="largest-at-peak",
        title="Largest tensors at the peak",
        columns=("made by", "in", "at", "shape", *(entry.name for entry in beside)),
        rows=tuple((*_described(made), *(_cell(entry, made) for entry in beside)) for made in rows),
        about="Of what a step has made: no parameters, no optimizer state. What backward has made has "
        f"the line of forward. {NOTHING}: not among the 20 largest of this trial, or not there.",
    )


def _living(entry: Entry) -> tuple[LivingTensor, ...]:
    return () if entry.record.memory is None else entry.record.memory.largest_at_peak


def _made(tensor: LivingTensor) -> _Made:
    return tensor.op, tensor.module, tensor.source, tensor.shape, tensor.dtype


def _described(made: _Made) -> Iterator[Line]:
    op, module, source, shape, dtype = made
    for name in (op, module, source):
        yield (CodeText(text=name),) if name else (NOTHING,)
    yield (f"{'×'.join(map(str, shape)) or 'scalar'} {dtype}",)  # noqa: RUF001 (times)


def _cell(entry: Entry, made: _Made) -> Line:
    """Return what a trial holds of one origin: as several parts where it is held as several."""
    parts: list[LinePart] = []
    for index, tensor in enumerate(_living(entry)):
        if _made(tensor) == made and (size := entry.number(quantities.largest_at_peak(index))) is not None:
            several = f" ({tensor.count} of them)" if tensor.count > 1 else ""
            parts += [", "] * bool(parts) + [size, f" {tensor.part}{several}"]
    return tuple(parts) or (NOTHING,)
