"""The table that a benchmark prints: a row a result, a column a field of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from rich.markup import escape
from rich.table import Table

from harness.records.statistics import Ratio

Column: TypeAlias = str | Callable[[Any], str]
"""What a column shows of a row: the field that `name` or `name:format` names, or what a function returns.

The format of a ratio is its number of digits.
"""

NOTHING = "-"
"""What stands where a field is `None`."""


def table_of(
    rows: Iterable[Any],
    columns: Mapping[str, Column],
    *,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """Return the table of `rows`; columns of numbers stand right.

    Args:
        rows: dataclasses, or anything else that the columns can read.
        columns: what each shows by its title, from left to right.
        title: above the table.
        caption: below the table.
    """
    texts = [[_text(row, column) for column in columns.values()] for row in rows]
    made = Table(title=title, caption=caption)
    for index, heading in enumerate(columns):
        is_numeric = all(_is_number(cells[index]) for cells in texts)
        made.add_column(heading, justify="right" if is_numeric else "left")
    for cells in texts:
        made.add_row(*map(escape, cells))
    return made


def _text(row: Any, column: Column) -> str:
    if not isinstance(column, str):
        return column(row)
    name, _, form = column.partition(":")
    value = getattr(row, name)
    if isinstance(value, Ratio):
        return f"{value.median:.{form}f} [{value.low:.{form}f}, {value.high:.{form}f}]"
    return NOTHING if value is None else format(value, form)


def _is_number(text: str) -> bool:
    return text in {"", NOTHING} or text[0].isdigit()
