"""The table of `acbench-plan`: what every point would need and take, and what of it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from harness.records.fields import encode
from harness.records.predicted_step import Outlook, assuming
from harness.records.record import Record
from harness.report.content.columns import FITS, Legend
from harness.report.content.terminal_table import Sheet
from harness.report.facts import quantities
from harness.report.facts.document import NOTHING
from harness.report.facts.labels import group_name, labels, mesh_sizes
from harness.report.facts.number_words import NumberUnit, and_more, human_bytes, human_flops, in_words
from harness.report.facts.plan_notes import questions, replaced
from harness.report.facts.sweep_records import STRATEGIES, grouped
from harness.report.facts.trial_notes import failure

LEGEND: Legend = {
    ("saved", "peak", "FLOPs", "collectives"): (
        "saved, peak, FLOPs, collectives: of one rank and one step; nothing has run."
    ),
    ("step time",): (
        "step time: a roofline of operators, collectives and host copies; *: nothing beside it needs less "
        "memory and less time (same model, mesh and recipe)."
    ),
    ("bound by",): "bound by: what the step waits for longest: compute, memory, network or host.",
    ("tokens/s",): "tokens/s: of a device.",
    ("job's tokens/s",): "job's tokens/s: of all devices together.",
}
_GIVEN = ("example", "example rows")
"""Kinds of inputs that a factory brings for every step."""

KERNELS = (
    "Bytes and FLOPs follow the CPU's kernels, because torch cannot fake CUDA's:\n"
    "workspaces of CUDA's kernels, and what its allocator loses, are not in them."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPoint:
    """One row.

    Fields:
        asked: the resolved experiment as it was asked for.
        record: the prediction; of the solved experiment where a field was solved for. Or the refusal.
        outlook: the answer about the point, next to its prediction.
        is_defect: whether a defect of ours kept it from being predicted.
    """

    asked: Mapping[str, Any]
    record: Record
    outlook: Outlook
    is_defect: bool = False

    @property
    def speed(self) -> float | None:
        """Tokens a second of a device; without tokens its samples, or steps where nobody counts those."""
        step_s = quantities.STEP_TIME.of(self.record)
        if not step_s:
            return None
        return quantities.TOKENS_PER_S.of(self.record) or (self.samples or 1) / step_s

    @property
    def samples(self) -> float | None:
        """Samples of a step by device; `None` where a factory brings the batch: nobody counts those."""
        trained, samples = self.record.trained, self.record.experiment.get("batch_size")
        is_counted = trained is None or trained.inputs not in _GIVEN
        devices = prod(mesh_sizes(self.record.experiment))
        return samples / devices if is_counted and isinstance(samples, int) else None

    @property
    def shown(self) -> Mapping[str, Any]:
        """The experiment that names the row: as it was asked for, on the mesh that was solved for."""
        solved = self.outlook.solved
        is_mesh = solved is not None and solved.field.startswith("mesh.")
        return {**self.asked, "mesh": self.record.experiment["mesh"]} if is_mesh else self.asked

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values, with what follows from the hardware."""
        said = self.outlook
        further = {
            "fits": said.fits,
            **{name: getattr(said, name) for name in ("hardware", "usable_bytes", "state", "bound_by")},
            "notes": [*_about(self), *_of_kernels([self])],
        }
        solved = {} if said.solved is None else {"solved": encode(said.solved)}
        return replace(self.record, outlook=said).to_dict() | further | solved


def plan_sheet(rows: Sequence[PlannedPoint]) -> Sheet:
    """Return the table of `rows`, in their order; columns that tell nothing apart are left out."""
    names = labels([row.shown for row in rows])
    columns = {
        "model": [group_name(row.asked, "model") for row in rows],
        "variant": [name.variant for name in names],
        "mesh": [name.mesh for name in names],
        "hardware": [row.outlook.hardware or NOTHING for row in rows],
        **_solved_columns(rows),
        **_predicted_columns(rows),
    }
    columns = {
        heading: cells
        for heading, cells in columns.items()
        if set(cells) != {NOTHING} and (heading not in _TELL_APART or len(set(cells)) > 1)
    }
    return Sheet(
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        notes=tuple(_notes(rows, [f"{name.variant} on {name.mesh}" for name in names])),
    )


_TELL_APART = ("model", "hardware")
"""Columns that say nothing where all rows have the same."""


def _predicted_columns(rows: Sequence[PlannedPoint]) -> dict[str, list[str]]:
    """Return what is predicted of each point, by heading; the best step times have a star."""
    best = _best(rows)
    times = [_cell(row, quantities.STEP_TIME) for row in rows]
    is_shared = any(
        quantities.TOKENS_PER_S.of(row.record) != quantities.JOB_TOKENS_PER_S.of(row.record) for row in rows
    )
    return {
        "saved": [_cell(row, quantities.SAVED) for row in rows],
        "peak": [_cell(row, quantities.PEAK) for row in rows],
        "fits": [FITS[row.outlook.fits] for row in rows],
        "FLOPs": [_flops(row.record) for row in rows],
        "step time": [f"{time} *" if index in best else time for index, time in enumerate(times)],
        "bound by": [row.outlook.bound_by or NOTHING for row in rows],
        "tokens/s": [_cell(row, quantities.TOKENS_PER_S) for row in rows],
        "job's tokens/s": [_cell(row, quantities.JOB_TOKENS_PER_S) if is_shared else NOTHING for row in rows],
        "state": [row.outlook.state for row in rows],
        "collectives": [_collectives(row.record) for row in rows],
    }


def _solved_columns(rows: Sequence[PlannedPoint]) -> dict[str, list[str]]:
    solved = [row.outlook.solved for row in rows]
    field = next((each.field for each in solved if each is not None), None)
    if field is None:
        return {}
    values = [None if each is None else each.value for each in solved]
    return {field: ["none" if value is None else f"{value:,}" for value in values]}


def _cell(row: PlannedPoint, quantity: quantities.Quantity) -> str:
    value = quantity.of(row.record)
    return NOTHING if value is None else in_words(value, quantity.unit)


def _flops(record: Record) -> str:
    work = record.work
    return NOTHING if work is None else human_flops(work.step_flops)


def _collectives(record: Record) -> str:
    """Return how many collectives a step has, and their bytes, as in `99 (49.6 GiB)`."""
    work = record.work
    if work is None or not any(work.collectives.values()):
        return NOTHING
    return f"{_total(work.collectives)} ({human_bytes(_total(work.collective_bytes))})"


def _total(by_phase: Mapping[str, Mapping[str, int]]) -> int:
    return sum(number for by_name in by_phase.values() for number in by_name.values())


def _best(rows: Sequence[PlannedPoint]) -> set[int]:
    """Return the rows on the memory-time front; where a field was solved for, the fastest."""
    best: set[int] = set()
    for group in _groups(rows).values():
        known = [index for index in group if rows[index].speed is not None]
        if any(rows[index].outlook.solved for index in known):
            fitting = [index for index in known if rows[index].outlook.fits]
            best |= {_fastest_of(rows, fitting)} if fitting else set()
        else:
            best |= {index for index in known if not any(_beats(rows[other], rows[index]) for other in known)}
    return best


def _fastest_of(rows: Sequence[PlannedPoint], numbers: Sequence[int]) -> int:
    """Return the fastest of the numbered rows; of equals that with the fewest bytes, then the plain one."""

    def worth(index: int) -> tuple[float, int, bool]:
        row = rows[index]
        return row.speed or 0, -(row.outlook.needed_bytes or 0), group_name(row.asked, "ac") == "none"

    return max(numbers, key=worth)


def _beats(one: PlannedPoint, other: PlannedPoint) -> bool:
    """Return whether `one` needs no more memory and no more time than `other`, and less of one of them."""
    mine, its = (
        (quantities.PEAK.of(row.record) or 0, quantities.STEP_TIME.of(row.record) or 0)
        for row in (one, other)
    )
    return mine != its and mine[0] <= its[0] and mine[1] <= its[1]


def _groups(rows: Sequence[PlannedPoint]) -> dict[str, list[int]]:
    return grouped(
        (
            repr((row.outlook.hardware, {key: row.asked[key] for key in row.asked if key not in STRATEGIES})),
            index,
        )
        for index, row in enumerate(rows)
    )


def _notes(rows: Sequence[PlannedPoint], names: Sequence[str]) -> Iterator[str]:
    """Yield one line a note; what many points share is said once."""
    yield from _fastest(rows, names)
    groups = grouped((note, name) for row, name in zip(rows, names, strict=True) for note in _about(row))
    for note, (first, *others) in groups.items():
        yield f"{first}{and_more(len(others))}: {note}"
    yield from _of_kernels(rows)


def _of_kernels(rows: Sequence[PlannedPoint]) -> Iterator[str]:
    if any(row.outlook.is_stand_in for row in rows):
        yield KERNELS


def _fastest(rows: Sequence[PlannedPoint], names: Sequence[str]) -> Iterator[str]:
    for group in _groups(rows).values():
        fitting = [index for index in group if rows[index].outlook.fits and rows[index].speed is not None]
        if fitting:
            best = _fastest_of(rows, fitting)
            where, speed = rows[best].outlook.hardware, _speed_in_words(rows[best])
            yield f"fastest that fits {where}: {names[best]}, {speed}"


def _speed_in_words(row: PlannedPoint) -> str:
    """Return how fast a row is, per device; by the step where a factory brings the batch."""
    is_token = quantities.TOKENS_PER_S.of(row.record) is not None
    if not is_token and row.samples is None:
        return f"{_cell(row, quantities.STEP_TIME)} a step"
    return f"{in_words(row.speed or 0, NumberUnit.RATE)} {'tokens' if is_token else 'samples'}/s of a device"


def _about(row: PlannedPoint) -> Iterator[str]:
    if row.record.error is not None:
        yield f"{row.record.status}, {failure(row.record.error)}"
    yield from questions(row.record)
    if row.record.assumes:
        yield assuming(row.record.assumes)
    yield from replaced(row.record)
    solved, needed = row.outlook.solved, row.outlook.needed_bytes
    if solved is not None and solved.value is None and needed is not None:
        yield f"no {solved.field} fits; the smallest step needs {human_bytes(needed)}"
    if solved is not None and solved.is_limit:
        yield f"{solved.field} is at its own limit, not at that of the memory"
