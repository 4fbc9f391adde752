"""The table at the end of a sweep: one row a trial, notes below for what does not fit into a cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.merge import Memory, Work
from harness.record import Failure, Record
from harness.report.labels import group_name, mesh_labels, variant_labels
from harness.statistics import is_distinguishable
from harness.store import RECORD
from harness.verdict import inert_because

_GAP = 3  # characters between two columns
_NOTHING = "-"
_PHASES = ("forward", "backward", "optimizer")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_FLOP_UNITS = ("", "k", "M", "G", "T", "P")
_LEGEND = (
    "saved, peak: maximum over ranks; FLOPs: of matmuls, convolutions and attention; "
    "ratio: median [95 % interval], ≈ 1 where the interval reaches 1 ± 0.01\n"
    "tokens/s: a device, with the machine's noise: compare rows by their ratio; "
    "MFU / HFU: of a published peak; collectives: forward+backward+optimizer"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A table as words, ready for any renderer.

    Fields:
        columns: headings.
        rows: as many cells as columns.
        notes: one line each.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def sheet(records: Sequence[Record], root: Path | None = None) -> Sheet:
    """Return the table of `records`, in their order.

    Args:
        records: of one sweep.
        root: the sweep's folder; notes then give paths.
    """
    experiments = [record.experiment for record in records]
    models = [group_name(experiment, "model") for experiment in experiments]
    cells: dict[str, list[str]] = {
        "model": models,
        "variant": variant_labels(experiments),
        "mesh": mesh_labels(experiments),
        **{heading: [cell(record) for record in records] for heading, cell in _CELLS.items()},
    }
    names = [f"{variant} on {mesh}" for variant, mesh in zip(cells["variant"], cells["mesh"], strict=True)]
    if len(set(models)) > 1:
        names = [f"{name}, {model}" for name, model in zip(names, models, strict=True)]
    else:
        del cells["model"]
    if all(cell == _NOTHING for cell in cells["predicted peak"]):
        del cells["predicted peak"]
    notes = _gathered(
        (name, note, _where(record, root))
        for name, record in zip(names, records, strict=True)
        for note in _notes(record)
    )
    return Sheet(columns=tuple(cells), rows=tuple(zip(*cells.values(), strict=True)), notes=tuple(notes))


def print_table(records: Sequence[Record], *, root: Path | None = None, stream: TextIO | None = None) -> None:
    """Print the table of `records` on stdout, a row a line.

    Where a terminal is too narrow for that, cells are wrapped between words, never within.
    """
    content = sheet(records, root)
    console = Console(file=stream or sys.stdout, highlight=False)
    columns = list(zip(content.columns, *content.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if console.is_terminal and _total_width(widths) > console.width:
        widths = [max(len(word) for cell in column for word in cell.split()) for column in columns]
    console.width = max(console.width, _total_width(widths))
    table = Table(box=box.SIMPLE_HEAD)
    for heading, width in zip(content.columns, widths, strict=True):
        table.add_column(heading, width=width)
    for row in content.rows:
        table.add_row(*(Text(cell) for cell in row))  # plain text: rich reads brackets in strings as markup
    console.print(table)
    for line in (_LEGEND, *content.notes):
        console.print(line, markup=False, soft_wrap=True)


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * len(widths) + 1


def to_markdown(records: Sequence[Record], root: Path | None = None) -> str:
    """Return the table of `records` as a markdown table with its notes as a list."""
    content = sheet(records, root)
    rows = [[cell.replace("|", "\\|") for cell in row] for row in content.rows]
    lines = [content.columns, ["---"] * len(content.columns), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"* {note}" for note in content.notes)
    return f"{table}\n\n{notes}\n" if notes else f"{table}\n"


def _verdict(record: Record) -> str:
    if record.verdict == "neutral" and record.parity is not None and record.parity.level == "tolerance":
        return "neutral (tolerance)"
    return record.verdict


def _saved(record: Record) -> str:
    return _NOTHING if record.memory is None else human_bytes(record.memory.saved_bytes)


def _peak(record: Record) -> str:
    return _NOTHING if record.memory is None else human_bytes(record.memory.peak_bytes)


def _predicted_peak(record: Record) -> str:
    if record.memory is None or record.memory.predicted_peak_bytes is None:
        return _NOTHING
    return human_bytes(record.memory.predicted_peak_bytes)


def _recomputed(record: Record) -> str:
    return _NOTHING if record.work is None else human_flops(record.work.recomputed_flops)


def _step_time(record: Record) -> str:
    if record.time is None or record.time.ratio_to_baseline is None:
        return _NOTHING
    ratio = record.time.ratio_to_baseline
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.median:.2f}× {interval}" if is_distinguishable(ratio) else f"≈ 1 {interval}"  # noqa: RUF001 (times)


def _tokens_per_s(record: Record) -> str:
    if record.time is None or record.time.tokens_per_s is None:
        return _NOTHING
    return f"{record.time.tokens_per_s:,.0f}"


def _utilisation(record: Record) -> str:
    # a peak that each trial measured for itself drifts with the machine: it must not rank rows
    if record.time is None or (record.time.peak_flops_per_s_source or "").startswith("measured"):
        return _NOTHING
    return " / ".join(
        _NOTHING if value is None else f"{value:.1%}" for value in (record.time.mfu, record.time.hfu)
    )


def _collectives(record: Record) -> str:
    if record.work is None:
        return _NOTHING
    by_phase = record.work.collectives
    names = dict.fromkeys(name for phase in _PHASES for name in by_phase.get(phase, {}))
    phases = _PHASES if by_phase.get("optimizer") else _PHASES[:2]
    counts = (
        f"{name} {'+'.join(str(by_phase.get(phase, {}).get(name, 0)) for phase in phases)}" for name in names
    )
    return ", ".join(counts) or _NOTHING


_CELLS: dict[str, Callable[[Record], str]] = {
    "status": lambda record: record.status,
    "verdict": _verdict,
    "saved": _saved,
    "peak": _peak,
    "predicted peak": _predicted_peak,
    "recomputed FLOPs": _recomputed,
    "step time vs baseline": _step_time,
    "tokens/s": _tokens_per_s,
    "MFU / HFU": _utilisation,
    "collectives": _collectives,
}


def human_bytes(count: int) -> str:
    """Return `count` bytes in the largest binary unit that leaves at least 1."""
    value, unit = _scaled(count, 1024, _BYTE_UNITS)
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_flops(count: int) -> str:
    """Return `count` FLOPs in the largest decimal unit that leaves at least 1."""
    value, unit = _scaled(count, 1000, _FLOP_UNITS)
    return f"{value:.2f} {unit}" if unit else str(count)


def _scaled(count: int, base: int, units: Sequence[str]) -> tuple[float, str]:
    power = 0
    while count >= base ** (power + 1) and power + 1 < len(units):
        power += 1
    return count / base**power, units[power]


def _gathered(notes: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return one line a note: what many trials share is said once, with the first of them."""
    by_text: dict[str, list[tuple[str, str]]] = {}
    for name, text, where in notes:
        by_text.setdefault(text, []).append((name, where))
    lines = []
    for text, named in by_text.items():
        name, where = named[0]
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        lines.append(f"{name}{more}: {text}{where}")
    return lines


def _where(record: Record, root: Path | None) -> str:
    """Return where to look further, for a trial that needs it."""
    needs = record.error is not None or record.verdict == "differs"
    return f" -> {root / record.trial_id / RECORD}" if needs and root is not None else ""


def _notes(record: Record) -> Iterator[str]:
    if record.error is not None:
        yield f"{record.status}, {_failure(record.error)}"
    if record.verdict == "differs" and record.parity is not None:
        yield from record.parity.differences()
    if record.memory is not None and record.work is not None:
        yield from _inaction(record.verdict, record.memory, record.work)
    if foreign := record.environment.get("foreign_processes"):
        yield f"{len(foreign)} foreign process(es) used the device while it ran"
    if record.note:
        yield record.note


def _failure(error: Failure) -> str:
    rank = "" if error.rank is None else f" on rank {error.rank}"
    phase = "" if error.phase is None else f" during {error.phase}"
    message, *_ = [*error.message.strip().splitlines(), ""]
    return f"{error.kind}{rank}{phase}: {message}"


def _inaction(verdict: str, memory: Memory, work: Work) -> Iterator[str]:
    if work.never_fired:
        yield f"never fired: {', '.join(work.never_fired)}"
    if verdict == "inert":
        yield f"inert: {inert_because(memory, work)}"
