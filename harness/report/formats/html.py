"""A report as one HTML file that needs no network: light and dark, on a phone, with a keyboard.

Every number is a `<data value>` with its exact value and where it stands in which record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.report.facts.document import (
    NOTHING,
    CodeText,
    Document,
    Figure,
    Line,
    LinePart,
    Mark,
    Number,
    Table,
    TrialName,
    plain,
)
from harness.report.formats.vega import library

_PAGE = Path(__file__).parent / "page"
_SORTABLE = ("results", "failures")


def to_html(document: Document, *, records: int, refresh_s: int | None = None) -> str:
    """Return the page.

    Args:
        records: how many it was made from.
        refresh_s: reload the page that often, for a sweep that runs; `None` never.
    """
    writer = _Writer(document)
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters |= {
        "line": writer.line,
        "table": writer.table,
        "specification": _specification,
    }
    has_figures = any(isinstance(item, Figure) for item in document.items)
    return environment.get_template("page.html.j2").render(
        document=document,
        records=records,
        refresh_s=refresh_s,
        style=Markup(_asset("page.css")),  # noqa: S704 (our own file)
        script=Markup(_asset("page.js")),  # noqa: S704 (our own file)
        library=Markup(library()) if has_figures else "",  # noqa: S704 (a pinned package)
        has_figures=has_figures,
    )


class _Writer:
    """Writes lines and tables; a trial's name links to its details where the document has them."""

    def __init__(self, document: Document) -> None:
        self._anchors = {item.key for item in document.items if isinstance(item, Table)}
        self._chapters = {
            trial_id: chapter.key for chapter in document.chapters for trial_id in chapter.trial_ids
        }

    def line(self, line: Line, of: str = "") -> Markup:
        return Markup("".join(self._part(part, of) for part in line))  # noqa: S704 (parts are escaped)

    def table(self, table: Table) -> Markup:
        """Return a table, which scrolls by itself, can be sorted, and may be folded."""
        numeric = [_is_numeric(column) for column in zip(*table.rows, strict=True)]
        body = "".join(self._row(row, numeric) for row in table.rows)
        headings = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
        about = f'<p class="about">{escape(table.about)}</p>' if table.about else ""
        name = f' aria-label="{escape(table.title)}"'
        kind = ' class="sortable"' if table.key in _SORTABLE else ""
        shown = (
            f'<div class="scroll" tabindex="0" role="region"{name}>'
            f'<table{kind} id="table-{escape(table.key)}"{name}>'
            f"<thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>{about}"
        )
        if table.is_folded:
            title = f"<summary>{escape(table.title)}</summary>"
            return Markup(f'<details id="{escape(table.key)}">{title}{shown}</details>')  # noqa: S704 (escaped)
        title = f'<h3 id="{escape(table.key)}-title">{escape(table.title)}</h3>'
        return Markup(f"{title}{shown}")  # noqa: S704 (escaped)

    def _row(self, row: tuple[Line, ...], numeric: Sequence[bool]) -> str:
        """Return a row; what it is of is noted once, on the row."""
        sources = {_source(part) for line in row for part in line if isinstance(part, Number)}
        of = sources.pop() if len(sources) == 1 else ""
        first, *others = row
        cells = "".join(
            f"<td{' class=number' if is_number else ''}>{self.line(cell, of)}</td>"
            for cell, is_number in zip(others, numeric[1:], strict=True)
        )
        name = f' data-t="{escape(of)}"' if of else ""
        name += "".join(f' data-chapter="{escape(key)}"' for key in self._chapter_of(first))
        return f'<tr{name}><th scope="row">{self.line(first, of)}</th>{cells}</tr>\n'

    def _chapter_of(self, line: Line) -> Iterator[str]:
        """Yield the chapter of the trial that a row is about, where a reader may choose among several."""
        if len(set(self._chapters.values())) > 1:
            found = (self._chapters.get(part.trial_id, "") for part in line if isinstance(part, TrialName))
            yield from (key for key in found if key)

    def _part(self, part: LinePart, of: str) -> str:
        text = escape(str(part))
        if isinstance(part, Number):
            source = _source(part)
            owner = f' data-t="{escape(source)}"' if source not in {"", of} else ""
            return f'<data value="{part.value}" data-p="{escape(part.path)}"{owner}>{text}</data>'
        if isinstance(part, TrialName):
            anchor = f"trial-{part.trial_id}"
            return f'<a href="#{escape(anchor)}">{text}</a>' if anchor in self._anchors else text
        if isinstance(part, CodeText):
            code = f"<code>{text}</code>"
            return f"<pre>{code}</pre>" if "\n" in part.text else code
        if isinstance(part, Mark):
            title = f' title="{escape(part.about)}"' if part.about else ""
            return f'<span class="mark {escape(part.text.split(" ")[0])}"{title}>{text}</span>'
        return text


def _source(number: Number) -> str:
    return f"{number.trial_id}@{number.sweep}" if number.sweep else number.trial_id


def _is_numeric(column: Sequence[Line]) -> bool:
    found = [cell for cell in column if plain(cell) != NOTHING]
    return bool(found) and all(len(cell) == 1 and isinstance(cell[0], Number) for cell in found)


def _specification(figure: Figure) -> Markup:
    text = json.dumps({**figure.spec, "data": {"values": list(figure.rows)}}, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704 (a script element ends at its first `<`)


def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
