"""Operators on pictures, run on chunks of rows: together they are what the operator gives of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strategies.chunk.flow.axes import Axis
from strategies.chunk.flow.row_window import RowWindow
from strategies.chunk.running.runtime import take_chunk
from strategies.chunk.running.windowed_rows import run_on_rows

aten = torch.ops.aten


def convolution(*options: Any) -> tuple[Any, ...]:
    kernel, stride, padding, dilation = options
    weight = torch.randn(3, 2, kernel, 1)
    return weight, None, [stride, 1], [padding, 0], [dilation, 1], False, [0, 0], 1


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("func", "window", "args"),
    [
        pytest.param(
            aten.convolution.default, RowWindow(2, 3, 7), convolution(7, 2, 3, 1), id="wide convolution"
        ),
        pytest.param(
            aten.convolution.default, RowWindow(1, 2, 5), convolution(3, 1, 2, 2), id="dilated convolution"
        ),
        pytest.param(
            aten.max_pool2d_with_indices.default, RowWindow(2, 1, 3), ([3, 1], [2, 1], [1, 0]), id="maxima"
        ),
        pytest.param(
            aten.max_pool2d_with_indices.default, RowWindow(1, 1, 3), ([3, 1], [1, 1], [1, 0]),
            id="maxima of three",
        ),
    ],
)  # fmt: skip
def test_chunks_of_rows_are_those_of_the_whole(
    func: Any, window: RowWindow, args: tuple[Any, ...], length: int
) -> None:
    torch.manual_seed(0)
    x = -torch.rand(1, 2, 6 * window.stride, 2) - 1  # zeros in the place of rows would be the maximum
    results = func(x, *args)
    expected = results if isinstance(results, torch.Tensor) else results[0]
    found = window.axes(Axis(2, 1, 6), x.shape, expected.shape)
    assert found is not None
    for start in range(0, 6, length):
        rows = min(length, 6 - start)
        chunk = take_chunk(x, found[0], start, rows, copy=False)
        made = run_on_rows(func, window, found, (start, rows), chunk, *args)
        part = made if isinstance(made, torch.Tensor) else made[0]
        torch.testing.assert_close(part, expected.narrow(2, start, rows))
