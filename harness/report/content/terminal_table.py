"""The table at the end of a sweep: one row a trial, notes below for what does not fit into a cell."""

from __future__ import annotations

import sys
import textwrap
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
from harness.report.content.answer import advice, differing
from harness.report.content.columns import (
    LEGEND,
    TWIN,
    Legend,
    legend,
    result_cells,
    twin_cells,
)
from harness.report.content.distances import cheaper
from harness.report.facts.column_blocks import NARROW
from harness.report.facts.document import NOTHING, plain
from harness.report.facts.number_words import and_more, printable
from harness.report.facts.sweep_records import Entry, SweepRecords, grouped, named, sweep_of

_GAP = 2  # characters between two columns
_NAMES = ("model", "variant", "mesh")
_UNREMARKABLE = {"status": "ok"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A table as words, ready for any renderer. `rows`: as many cells as columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def sheet(entries: Sequence[Entry], root: Path | None = None) -> Sheet:
    """Return the table of trials, in their order. `root`: the sweep's folder; notes then give paths."""
    found = [result_cells(entry) for entry in entries]
    twin = twin_cells(entries)
    found += [] if twin is None else [twin]
    twins = entries if twin is not None else []
    columns: dict[str, list[str]] = {
        "model": [entry.model for entry in (*entries, *twins)],
        "variant": [*(entry.variant for entry in entries), *(TWIN for _ in twins)],
        "mesh": [entry.mesh for entry in (*entries, *twins)],
        **{heading: [plain(row[heading]) for row in found] for heading in (found[0] if found else ())},
    }
    if len(set(columns["model"])) < 2:  # noqa: PLR2004 (one model needs no column)
        del columns["model"]
    for heading in ("predicted peak", "above bound"):
        if set(columns.get(heading, ())) <= {NOTHING}:
            columns.pop(heading, None)
    return Sheet(
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        notes=tuple(_notes_below(entries, root)),
    )


def print_table(records: Sequence[Record], *, root: Path | None = None, stream: TextIO | None = None) -> None:
    """Print the table of `records` on stdout, in their order; see `print_sweep`."""
    print_sweep(sweep_of(records, name=""), named(records), root=root, stream=stream)


def print_sweep(
    sweep: SweepRecords, ordered: Sequence[Entry], *, root: Path | None = None, stream: TextIO | None = None
) -> None:
    """Print the table of a sweep on stdout, a row a line; see `print_sheet`.

    Columns in which no trial has anything are left out. A name too long for any table makes the lines longer.

    Args:
        root: the sweep's folder; notes then give paths.
    """
    content = _filled(sheet(ordered, root))
    last = [plain(each.line) for each in advice(sweep)]
    further = [plain(differing([entry.experiment for entry in ordered]))]
    print_sheet(content, LEGEND, further=further, last=last, stream=stream)


def print_sheet(
    content: Sheet,
    explained: Legend,
    *,
    further: Sequence[str] = (),
    last: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Print a table, then the sentences `further`, its notes, and the sentences `last`.

    A row is one line. On a terminal that is too narrow the last columns are left out, and it is said which;
    where not even the names fit, cells are wrapped between words. Elsewhere lines are as long as it takes.

    Args:
        explained: what its columns mean; of those that are shown it is printed.
    """
    console = Console(file=stream or sys.stdout, highlight=False, emoji=False)
    limit = max(NARROW, console.width) if console.is_terminal else None
    kept = _fitting(content, limit)
    _print_block(content, range(kept), console)
    console.print()
    shown, left_out = content.columns[:kept], content.columns[kept:]
    narrow = f"left out, because the terminal is too narrow: {', '.join(left_out)}." if left_out else ""
    further = (*legend(explained, shown), *further, narrow)
    above, below = ([textwrap.fill(_visible(each), NARROW) for each in group] for group in (further, last))
    for line in (*above, *map(_visible, content.notes), *below):
        if line:
            console.print(line, markup=False, soft_wrap=True)


def _fitting(content: Sheet, limit: int | None) -> int:
    """Return how many columns fit a line of `limit` characters: the names and one more, at least."""
    widths = _widths(content)
    least = min(sum(heading in _NAMES for heading in content.columns) + 1, len(widths))
    counts = range(len(widths), least, -1)
    return next((n for n in counts if limit is None or _total_width(widths[:n]) <= limit), least)


def _visible(text: str) -> str:
    """Return what somebody has named or said without what steers a terminal."""
    return " ".join(printable(text).split("\n"))


def _filled(content: Sheet) -> Sheet:
    """Return the columns that tell trials apart or say something of one."""
    columns = dict(zip(content.columns, zip(*content.rows, strict=True), strict=True))
    shown = {
        heading: cells
        for heading, cells in columns.items()
        if heading in _NAMES or set(cells) - {_UNREMARKABLE.get(heading, NOTHING)}
    }
    return Sheet(columns=tuple(shown), rows=tuple(zip(*shown.values(), strict=True)), notes=content.notes)


def _print_block(content: Sheet, block: Sequence[int], console: Console) -> None:
    shown = Sheet(
        columns=tuple(content.columns[each] for each in block),
        rows=tuple(tuple(row[each] for each in block) for row in content.rows),
        notes=(),
    )
    widths = _widths(shown)
    if console.is_terminal and _total_width(widths) > console.width:
        cells = zip(shown.columns, *shown.rows, strict=True)
        widths = [max(len(word) for cell in column for word in cell.split()) for column in cells]
    console.width = max(console.width, _total_width(widths))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for heading, width in zip(shown.columns, widths, strict=True):
        table.add_column(heading, width=width)
    for row in shown.rows:
        table.add_row(*(Text(_visible(cell)) for cell in row))  # rich reads brackets in strings as markup
    console.print()
    console.print(table)


def _widths(content: Sheet) -> list[int]:
    return [
        max(map(len, (*heading.split(), *cells)))
        for heading, *cells in zip(content.columns, *content.rows, strict=True)
    ]


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _notes_below(entries: Sequence[Entry], root: Path | None) -> Iterator[str]:
    """Yield one line a note: what many trials share is said once, with the first of them."""
    groups = grouped((note, entry) for entry in entries for note in entry.notes)
    for note, (first, *others) in groups.items():
        yield f"{first.name}{and_more(len(others))}: {note}{_where(first.record, root)}"
    yield from (f"{entry.name}{plain(parts)}" for entry, _, parts in cheaper(entries))


def _where(record: Record, root: Path | None) -> str:
    needs = record.error is not None or record.verdict == "differs"
    return f" -> {root / record.trial_id / RECORD}" if needs and root is not None else ""
