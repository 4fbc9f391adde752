"""Row windows: the rows of its input that a chunk of an operator's result takes."""

from __future__ import annotations

import pytest

from strategies.chunk.flow.axes import Axis
from strategies.chunk.flow.row_window import RowPlace, RowWindow

ROWS = Axis(2, 1, 8)
TALL = (1, 6, 16, 4)
WIDE = (1, 6, 8, 4)


@pytest.mark.parametrize(
    ("window", "axis", "source", "taken", "given"),
    [
        pytest.param(RowWindow(1, 1, 3), ROWS, WIDE, Axis(2, 1, 8, low=1, high=1), ROWS, id="3 rows"),
        pytest.param(RowWindow(2, 1, 3), ROWS, TALL, Axis(2, 2, 8, low=1), ROWS, id="3 rows, each second"),
        pytest.param(RowWindow(2, 3, 7), ROWS, TALL, Axis(2, 2, 8, low=3, high=2), ROWS, id="7 rows"),
        pytest.param(RowWindow(2, 0, 1), ROWS, TALL, Axis(2, 2, 8), ROWS, id="each second row"),
        pytest.param(
            RowWindow(1, 1, 3), ROWS._replace(low=1, high=1), WIDE, Axis(2, 1, 8, low=2, high=2),
            ROWS._replace(low=1, high=1), id="for 3 rows of its result",
        ),
        pytest.param(
            RowWindow(factor=2), Axis(2, 2, 4, low=1, high=1), (1, 6, 4, 4), Axis(2, 1, 4, low=1, high=1),
            Axis(2, 2, 4, low=2, high=2), id="repeated rows, for 3 of them",
        ),
        pytest.param(RowWindow(1, 0, 3), ROWS, (1, 6, 10, 4), None, None, id="without padding"),
        pytest.param(RowWindow(factor=2), ROWS, (1, 6, 4, 4), None, None, id="one of repeated rows"),
    ],
)  # fmt: skip
def test_rows_of_a_result_take_rows_of_the_input(
    window: RowWindow, axis: Axis, source: tuple[int, ...], taken: Axis | None, given: Axis | None
) -> None:
    made = (*source[:2], axis.inner * axis.extent, *source[3:])
    found = window.axes(axis, source, made)
    assert found == (None if taken is None else (taken, given))


@pytest.mark.parametrize(
    ("window", "source", "start", "length", "expected"),
    [
        pytest.param(RowWindow(1, 1, 3), WIDE, 0, 3, RowPlace(3, 1, 0, 0), id="at the top"),
        pytest.param(RowWindow(1, 1, 3), WIDE, 3, 3, RowPlace(3, 0, 0, 1), id="in the middle"),
        pytest.param(RowWindow(1, 1, 3), WIDE, 6, 2, RowPlace(2, 0, 1, 1), id="at the bottom"),
        pytest.param(RowWindow(2, 1, 3), TALL, 6, 2, RowPlace(2, 0, 0, 1), id="at a bottom without padding"),
        pytest.param(RowWindow(1, 2, 5), WIDE, 1, 1, RowPlace(1, 1, 0, 1), id="one row behind the top"),
        pytest.param(RowWindow(1, 4, 9), WIDE, 0, 8, RowPlace(8, 4, 4, 0), id="all rows"),
    ],
)
def test_padding_stands_at_the_true_border_only(
    window: RowWindow, source: tuple[int, ...], start: int, length: int, expected: RowPlace
) -> None:
    found = window.axes(ROWS, source, WIDE)
    assert found is not None
    assert window.place(*found, start, length) == expected
