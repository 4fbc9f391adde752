"""A report as markdown with its figures as SVG: for a pull request, a wiki, the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from harness.report.facts.document import CodeText, Document, Figure, Line, Table
from harness.report.formats import vega

_MARKUP = re.compile(r"[\\|<`*~$]|(?<!\w)_|_(?!\w)|\](?=[(\[:])|&(?=#?\w+;)|^[#>]")
_WIDTH = 720  # of a figure, in pixels
_INK, _SOFT, _LINE = "#1c1d1f", "#5b6068", "#dcdfe4"
_CONFIG = {
    "background": "white",
    "padding": 12,
    "font": "sans-serif",
    "view": {"stroke": None},
    "range": {
        "category": ["#4c78e0", "#e0a100", "#f0685a", "#3fae8f", "#a46be8", "#e76fae", "#8f9bad", "#59b8e6"]
    },
    "axis": {
        "labelColor": _SOFT,
        "titleColor": _INK,
        "gridColor": _LINE,
        "domainColor": _LINE,
        "labelLimit": 400,
    },
    "legend": {
        "orient": "top",
        "labelColor": _INK,
        "titleColor": _SOFT,
        "labelLimit": 230,
        "columns": 4,
        "layout": {"top": {"direction": "vertical"}},
    },
    "text": {"color": _INK},
    "tick": {"color": _INK},
}
"""The page's light theme, where no style sheet reaches."""


def to_markdown(document: Document, figures: str) -> str:
    """Return the report; figures are linked as `<figures>/<key>.svg`."""
    return "\n".join(_blocks(document, figures)).rstrip() + "\n"


def to_svg(figure: Figure) -> str:
    """Return a figure as it is on the light page."""
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **figure.spec,
        "data": {"values": list(figure.rows)},
        "width": _WIDTH,
    }
    return vega.to_svg(spec, _CONFIG)


def markdown_table(table: Table) -> str:
    """Return a table alone."""
    lines = [
        [_escaped(column) for column in table.columns],
        ["---"] * len(table.columns),
        *([in_markdown(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def in_markdown(line: Line) -> str:
    """Return a line with code as code; what markdown reads as markup or a column is escaped."""
    return "".join(_code(part.text) if isinstance(part, CodeText) else _escaped(str(part)) for part in line)


def _blocks(document: Document, figures: str) -> Iterator[str]:
    yield f"# {_escaped(document.title)}\n"
    yield f"{in_markdown(document.subtitle)}\n"
    for statement in document.answer:
        yield f"* {in_markdown(statement.line)}"
    for section in document.sections:
        yield f"\n## {section.title}\n"
        yield from (f"* {in_markdown(statement.line)}" for statement in section.statements)
        for item in section.items:
            yield from _figure(item, figures) if isinstance(item, Figure) else _table(item)


def _figure(figure: Figure, figures: str) -> Iterator[str]:
    yield f"\n### {figure.title}\n"
    yield f"{_escaped(figure.about)}\n"
    yield f"![{figure.title}]({figures}/{figure.key}.svg)"


def _table(table: Table) -> Iterator[str]:
    about = f"\n{_escaped(table.about)}" if table.about else ""
    if table.is_folded:
        title = escape(" ".join(table.title.split()))  # within a tag markdown escapes nothing
        yield f"\n<details><summary>{title}</summary>\n\n{markdown_table(table)}\n{about}"
        yield "\n</details>"
    else:
        yield f"\n### {_escaped(table.title)}\n\n{markdown_table(table)}\n{about}"


def _code(text: str) -> str:
    """Return code on one line, in ticks enough to hold it; a bar would end the cell."""
    flat = " ".join(text.split()).replace("|", "\\|") or " "
    ticks = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    return f"{ticks} {flat} {ticks}" if "`" in flat else f"`{flat}`"


def _escaped(text: str) -> str:
    flat = " ".join(text.split()) if "\n" in text else text
    return _MARKUP.sub(r"\\\g<0>", flat)
