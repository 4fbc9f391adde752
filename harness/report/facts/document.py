"""A report as a typed document: what it says, with every number's exact value and where it comes from.

Backends write it down (HTML, markdown, a terminal); none of them computes anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.facts.number_words import NumberUnit, in_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number of the store.

    Fields:
        value: exact, in base units (bytes, FLOPs, seconds).
        path: where it stands in the record (`memory/saved_bytes`); `a : b` is the quotient of two such
            numbers, `1 - a : b` what it leaves of 1, `pooled time/mfu` a speed at the step time that follows
            from the twins of the whole sweep, and `count status=oom` a number of records.
        trial_id: id of that record; empty for counts.
        sweep: number of the compared sweep that holds it, from 0.
    """

    value: float
    unit: NumberUnit
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


NOTHING = "-"
"""The cell of what a trial has not."""

LinePart = str | Number | CodeText | TrialName | Mark
Line = tuple[LinePart, ...]
"""A cell or a sentence: words and numbers in turn."""


def plain(line: Sequence[LinePart]) -> str:
    """Return a line as plain text."""
    return "".join(map(str, line))


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A sentence that follows from records. `is_setting`: it says what was trained, and finds nothing."""

    line: Line
    trial_ids: tuple[str, ...]
    is_setting: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells.

    Fields:
        key: unique in the document.
        rows: as many cells as columns.
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
        about: how to read it; also what a reader hears who cannot see it.
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
class Chapter:
    """A chapter of a report on one part of a sweep, which a reader may choose among others.

    Fields:
        key: unique in the document.
        answer: what was trained on what, then what a reader should take away.
    """

    key: str
    title: str
    answer: tuple[Statement, ...]
    items: tuple[Figure | Table, ...]
    trial_ids: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A report.

    Fields:
        subtitle: on what, when, how many.
        differing: which fields differ between the trials; empty where none does.
        partial: a sentence where trials have no record; else empty.
        chapters: what is answered apart, the best examined first.
        answer: what a reader should take away of all of them.
    """

    title: str
    subtitle: Line
    differing: Line = ()
    partial: str
    chapters: tuple[Chapter, ...] = ()
    answer: tuple[Statement, ...]
    sections: tuple[Section, ...]

    @property
    def statements(self) -> tuple[Statement, ...]:
        """The answers of all chapters, then that of the whole."""
        return (*(statement for chapter in self.chapters for statement in chapter.answer), *self.answer)

    @property
    def items(self) -> tuple[Figure | Table, ...]:
        """The figures and tables of all chapters and sections."""
        parts: Sequence[Chapter | Section] = (*self.chapters, *self.sections)
        return tuple(item for part in parts for item in part.items)
