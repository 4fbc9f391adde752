"""Tables for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str, marked: int | None = None
) -> str:
    """Return a table; all text in it is escaped.

    Args:
        head: titles of the columns.
        rows: cells, the first of each row its name.
        title: a sentence above it.
        marked: number of the row in bold; `None` for none.
    """
    cells = "".join(f"<th style='text-align:left'>{escape(each)}</th>" for each in head)
    body = "".join(_row(row, is_marked=number == marked) for number, row in enumerate(rows))
    return f"<p><b>{escape(title)}</b></p><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _row(row: Sequence[str], *, is_marked: bool) -> str:
    open_, close = ("<b>", "</b>") if is_marked else ("", "")
    return (
        "<tr>"
        + "".join(f"<td style='text-align:left'>{open_}{escape(cell)}{close}</td>" for cell in row)
        + "</tr>"
    )
