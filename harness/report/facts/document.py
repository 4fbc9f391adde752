"""A report as a typed document: what it says, with every number's exact value and where it comes from.

Backends write it down (HTML, markdown, a terminal); none of them computes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.facts.number_words import Unit, in_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number of the store.

    Fields:
        value: exact, in base units (bytes, FLOPs, seconds).
        unit: how it is written.
        path: where it stands in the record (`memory/saved_bytes`); `a : b` is the quotient of two such
            numbers, and `count status=oom` a number of records.
        trial_id: id of that record; empty for counts.
        sweep: number of the compared sweep that holds it, from 0.
    """

    value: float
    unit: Unit
    path: str
    trial_id: str = ""
    sweep: int = 0

    def __str__(self) -> str:
        """Return the number as people write it."""
        return in_words(self.value, self.unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeText:
    """Text to type or to search for: an operator, a command, a path."""

    text: str

    def __str__(self) -> str:
        """Return the text alone."""
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialName:
    """The name of a trial; a link where the report has details of the trial."""

    name: str
    trial_id: str

    def __str__(self) -> str:
        """Return the name."""
        return self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A status or verdict, which may be coloured; `about` explains it where there is room."""

    text: str
    about: str = ""

    def __str__(self) -> str:
        """Return the status or verdict."""
        return self.text


LinePart = str | Number | CodeText | TrialName | Mark
Line = tuple[LinePart, ...]
"""A cell or a sentence: words and numbers in turn."""


def plain(line: Sequence[LinePart]) -> str:
    """Return a line as plain text."""
    return "".join(map(str, line))


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A sentence that follows from records.

    Fields:
        line: the sentence.
        trial_ids: the records it follows from.
    """

    line: Line
    trial_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells.

    Fields:
        key: unique in the document.
        title: heading.
        columns: headings of columns.
        rows: as many cells as columns.
        about: how to read it.
        is_folded: shown on demand where that is possible.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    about: str = ""
    is_folded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A picture of numbers, as a Vega-Lite specification without its data.

    Fields:
        key: unique in the document.
        title: heading.
        about: how to read it; also what a reader hears who cannot see it.
        spec: marks and encodings.
        rows: the data, a mapping a mark; `trial_id` says of which record.
        paths: what stands in a column of `rows`, as in `Number.path`, with other columns in braces; words
            have none.
    """

    key: str
    title: str
    about: str
    spec: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    paths: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a report: statements, then figures and tables."""

    key: str
    title: str
    statements: tuple[Statement, ...] = ()
    items: tuple[Figure | Table, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A report.

    Fields:
        title: what was compared.
        subtitle: on what, when, how many.
        partial: a sentence where trials have no record; else empty.
        answer: what a reader should take away, best first.
        sections: everything behind it.
    """

    title: str
    subtitle: Line
    partial: str
    answer: tuple[Statement, ...]
    sections: tuple[Section, ...]
