from __future__ import annotations

import pytest

from harness.report.facts.column_blocks import column_blocks


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([[4, 4, 3]], [[0, 1, 2]], id="all fit"),
        pytest.param([[4, 5, 5]], [[0, 1], [0, 2]], id="one beside the name"),
        pytest.param([[4, 2, 2, 6]], [[0, 1, 2], [0, 3]], id="as many as fit, in order"),
        pytest.param([[4, 12, 2]], [[0, 1, 2]], id="what fits nowhere"),
        pytest.param([[4, 1, 5], [4, 5, 1]], [[0, 1, 2]], id="no line is too long"),
        pytest.param([[4]], [[0]], id="names alone"),
    ],
)
def test_columns_that_fit_stand_together(lines: list[list[int]], expected: list[list[int]]) -> None:
    assert column_blocks(lines, named=1, gap=1, limit=14) == expected
