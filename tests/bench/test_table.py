"""A column shows a field, formatted, or what a function makes of the row; numbers stand right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.table import Column, table_of


@dataclass(frozen=True)
class Measured:
    name: str
    peak_bytes: int | None


ROWS = (Measured("plain", 1234567), Measured("refused", None))


@pytest.mark.parametrize(
    ("shown", "cells", "justify"),
    [
        pytest.param("name", ["plain", "refused"], "left", id="words"),
        pytest.param("peak_bytes:,", ["1,234,567", "-"], "right", id="a number, and none"),
        pytest.param(lambda row: row.name.upper(), ["PLAIN", "REFUSED"], "left", id="a function"),
        pytest.param(lambda row: f"{len(row.name)} B", ["5 B", "7 B"], "right", id="a number with its unit"),
    ],
)
def test_a_column(shown: Column, cells: list[str], justify: str) -> None:
    (column,) = table_of(ROWS, {"title": shown}).columns
    assert (column.header, list(column.cells), column.justify) == ("title", cells, justify)


def test_title_and_caption() -> None:
    table = table_of(ROWS, {"name": "name"}, title="above", caption="below")
    assert (table.title, table.caption, table.row_count) == ("above", "below", 2)
