"""The table at the end of a sweep: one row a trial, notes below for what does not fit into a cell."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.records.record import Record
from harness.records.store import RECORD
from harness.report.content.columns import NOTHING, notes, result_cells
from harness.report.facts.document import plain
from harness.report.facts.number_words import and_more, printable
from harness.report.facts.sweep_records import Entry, grouped, named

_GAP = 3  # characters between two columns
LEGEND = (
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
        records: records of one sweep.
        root: the sweep's folder; notes then give paths.
    """
    entries = named(records)
    found = [result_cells(entry) for entry in entries]
    columns: dict[str, list[str]] = {
        "model": [entry.model for entry in entries],
        "variant": [entry.variant for entry in entries],
        "mesh": [entry.mesh for entry in entries],
        **{heading: [plain(row[heading]) for row in found] for heading in (found[0] if found else ())},
    }
    if len(set(columns["model"])) < 2:  # noqa: PLR2004 (one model needs no column)
        del columns["model"]
    if set(columns.get("predicted peak", ())) <= {NOTHING}:
        columns.pop("predicted peak", None)
    return Sheet(
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        notes=tuple(_notes_below(entries, root)),
    )


def print_table(records: Sequence[Record], *, root: Path | None = None, stream: TextIO | None = None) -> None:
    """Print the table of `records` on stdout, a row a line.

    Where a terminal is too narrow for that, cells are wrapped between words, never within.
    """
    content = sheet(records, root)
    console = Console(file=stream or sys.stdout, highlight=False)
    widths = _widths(content, console)
    console.width = max(console.width, _total_width(widths))
    table = Table(box=box.SIMPLE_HEAD)
    for heading, width in zip(content.columns, widths, strict=True):
        table.add_column(heading, width=width)
    for row in content.rows:
        table.add_row(*(Text(_visible(cell)) for cell in row))  # rich reads brackets in strings as markup
    console.print(table)
    for line in (LEGEND, *content.notes):
        console.print(_visible(line), markup=False, soft_wrap=True)


def _visible(text: str) -> str:
    """Return what somebody has named or said without what steers a terminal."""
    return printable(text).replace("\r", " ")


def _widths(content: Sheet, console: Console) -> list[int]:
    columns = list(zip(content.columns, *content.rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if console.is_terminal and _total_width(widths) > console.width:
        return [max(len(word) for cell in column for word in cell.split()) for column in columns]
    return widths


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * len(widths) + 1


def _notes_below(entries: Sequence[Entry], root: Path | None) -> Iterator[str]:
    """Yield one line a note: what many trials share is said once, with the first of them."""
    groups = grouped((note, entry) for entry in entries for note in notes(entry.record))
    for note, (first, *others) in groups.items():
        yield f"{first.name}{and_more(len(others))}: {note}{_where(first.record, root)}"


def _where(record: Record, root: Path | None) -> str:
    """Return where to look further, for a trial that needs it."""
    needs = record.error is not None or record.verdict == "differs"
    return f" -> {root / record.trial_id / RECORD}" if needs and root is not None else ""
