"""Axes of chunks: where they are behind a view or a slice, and which part of a tensor a chunk is."""

from __future__ import annotations

import pytest
import torch

from strategies.chunk.flow.axes import Axis, through_slice, through_view


@pytest.mark.parametrize(
    ("source", "target", "axis", "expected"),
    [
        pytest.param((12, 8), (2, 6, 8), Axis(0, 1, 12), Axis(0, 1, 12, 2), id="rows of a batch"),
        pytest.param((2, 6, 8), (12, 8), Axis(0, 1, 12, 2), Axis(0, 1, 12), id="rows put together"),
        pytest.param((2, 6, 8), (12, 8), Axis(1, 1, 6), Axis(0, 1, 6), id="positions of each sequence"),
        pytest.param((2, 6, 8), (12, 8), Axis(0, 1, 2), Axis(0, 6, 2), id="sequences"),
        pytest.param((12, 8), (3, 4, 2, 4), Axis(0, 1, 12), Axis(0, 1, 12, 2), id="inner ones split too"),
        pytest.param((12, 8), (1, 12, 1, 8), Axis(0, 1, 12), Axis(1, 1, 12), id="beside dimensions of one"),
        pytest.param((24, 8), (2, 3, 4, 8), Axis(0, 1, 24), Axis(0, 1, 24, 3), id="three dimensions"),
        pytest.param((24,), (4, 6), Axis(0, 3, 8), Axis(0, 3, 8, 2), id="rows of three, over two dimensions"),
        pytest.param(
            (24,), (6, 4), Axis(0, 3, 8), Axis(0, 3, 8, 2), id="rows of three, that a dimension cuts"
        ),
        pytest.param((4, 3), (3, 4), Axis(1, 1, 3), None, id="every third, in rows of four"),
        pytest.param(
            (2, 5, 8), (10, 8), Axis(1, 1, 4, 1, 0, 1), Axis(0, 1, 4, 1, 0, 1), id="without the last"
        ),
    ],
)
def test_an_axis_keeps_its_elements_in_a_view(
    source: tuple[int, ...], target: tuple[int, ...], axis: Axis, expected: Axis | None
) -> None:
    assert through_view(source, target, axis) == expected


@pytest.mark.parametrize(
    ("axis", "first", "width", "expected"),
    [
        pytest.param(Axis(1, 1, 5), 0, 6, Axis(1, 1, 5, 1, 0, 1), id="all but the last"),
        pytest.param(Axis(1, 1, 5), 1, 6, Axis(1, 1, 5, 1, 1, 0), id="all but the first"),
        pytest.param(Axis(1, 1, 4, 1, 1, 0), -1, 4, Axis(1, 1, 4), id="back to what is left"),
        pytest.param(Axis(1, 1, 5), -1, 4, None, id="a position is cut off"),
        pytest.param(Axis(1, 5, 1), 1, 6, None, id="not at the end of a position"),
        pytest.param(Axis(0, 1, 10, 2), 1, 6, None, id="dimensions seen as one"),
    ],
)
def test_an_axis_has_positions_around_it_in_front_of_a_slice(
    axis: Axis, first: int, width: int, expected: Axis | None
) -> None:
    assert through_slice((2, 5, 8), axis, first, width) == expected


def test_what_a_chunk_has() -> None:
    rows, later = Axis(0, 1, 12, 2), Axis(1, 1, 5, 1, 1, 0)
    assert rows.chunk_shape((2, 6, 8), 4) == [1, 4, 8]
    assert (rows.is_complete, later.is_complete) == (True, False)
    assert (rows.share(96), later.share(96)) == (96, 80)
    assert (rows.outer((2, 6, 8)), later.outer((2, 6, 8)), later.factor((2, 6, 8))) == (1, 1, 1)


@pytest.mark.parametrize(
    ("axis", "is_one"), [(Axis(0, 1, 12, 2), False), (Axis(1, 1, 24, 2), True), (Axis(1, 1, 6), True)]
)
def test_dimensions_of_one_stride(axis: Axis, is_one: bool) -> None:
    turned = torch.empty(6, 4, 2).permute(2, 0, 1)
    assert axis.is_one_stride(turned) is is_one
