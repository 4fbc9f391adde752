"""A report as markdown with its figures as SVG: for a pull request, a wiki, the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from harness.report.facts.column_blocks import NARROW, column_blocks
from harness.report.facts.document import Chapter, CodeText, Document, Figure, Line, Section, Table
from harness.report.formats import vega

_MARKUP = re.compile(r"[\\|<`*~$]|(?<!\w)_|_(?!\w)|\](?=[(\[:])|&(?=#?\w+;)|^[#>]")
_WIDTH = 720  # of a figure, in pixels
_PANELS = 2  # next to one another
_MARGIN = 24  # of a panel, in pixels
_INK, _SOFT, _LINE = "#1c1d1f", "#5b6068", "#dcdfe4"
_CONFIG = {
    "aria": False,  # no program reads the words of each mark aloud from a picture
    "background": "white",
    "padding": 12,
    "font": "sans-serif",
    "view": {"stroke": None},
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
    "rule": {"color": _SOFT},
}
"""The page's light theme, where no style sheet reaches."""


def to_markdown(document: Document, figures: str) -> str:
    """Return the report; figures are linked as `<figures>/<key>.svg`."""
    return "\n".join(_blocks(document, figures)).rstrip() + "\n"


def to_svg(figure: Figure) -> str:
    """Return a figure as it is on the light page, without what only shows its words there."""
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **_drawn(figure.spec),
        "data": {"values": list(figure.rows)},
        **(_panels(figure) if "facet" in figure.spec else {"width": _WIDTH}),
    }
    return vega.to_svg(spec, _CONFIG)


def _drawn(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return `spec` without layers that nobody sees: on a page they take the pointer."""
    inner = {"spec": _drawn(spec["spec"])} if "spec" in spec else {}
    seen = [
        layer for layer in spec.get("layer", ()) if "opacity" not in _mark(layer) or _mark(layer)["opacity"]
    ]
    return {**spec, **inner, **({"layer": seen} if "layer" in spec else {})}


def _mark(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    mark = layer.get("mark", {})
    return mark if isinstance(mark, Mapping) else {}


def _panels(figure: Figure) -> dict[str, Any]:
    """Return how many panels stand next to one another, and how wide each is."""
    field = figure.spec["facet"]["field"]
    columns = min(_PANELS, len({row[field] for row in figure.rows}))
    return {"columns": columns, "spec": {**_drawn(figure.spec["spec"]), "width": _WIDTH // columns - _MARGIN}}


def markdown_table(table: Table) -> str:
    """Return a table alone; in several that begin with the same column where one is too wide."""
    lines = [
        [_escaped(column) for column in table.columns],
        ["---"] * len(table.columns),
        *([in_markdown(cell) for cell in row] for row in table.rows),
    ]
    widths = [list(map(len, line)) for line in lines]
    blocks = column_blocks(widths, named=1, gap=len(" | "), limit=NARROW - 1)
    return "\n\n".join(
        "\n".join(f"| {' | '.join(line[column] for column in block)} |" for line in lines) for block in blocks
    )


def in_markdown(line: Line) -> str:
    """Return a line with code as code; what markdown reads as markup or a column is escaped."""
    return "".join(_code(part.text) if isinstance(part, CodeText) else _escaped(str(part)) for part in line)


def _blocks(document: Document, figures: str) -> Iterator[str]:
    """Yield the blocks of a page."""
    yield f"# {_escaped(document.title)}\n"
    yield f"{in_markdown(document.subtitle)}\n"
    if document.differing:
        yield f"{in_markdown(document.differing)}\n"
    yield from (f"* {in_markdown(statement.line)}" for statement in document.statements)
    for chapter in document.chapters:
        yield f"\n## {_escaped(chapter.title)}\n"
        yield from _items(chapter, figures)
    for section in document.sections:
        yield f"\n## {section.title}\n"
        yield from (f"* {in_markdown(statement.line)}" for statement in section.statements)
        yield from _items(section, figures)


def _items(part: Chapter | Section, figures: str) -> Iterator[str]:
    for item in part.items:
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
