"""Operators on pictures, run on some of the rows: zeros, or what else pads, stand at the true border only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strategies.chunk.flow.axes import Axis
from strategies.chunk.flow.row_window import ROWS, RowWindow

_aten = torch.ops.aten
_PADDINGS = {_aten.convolution.default: (3, 0.0), _aten.max_pool2d_with_indices.default: (2, float("-inf"))}
"""Position of the padding among the arguments behind the input, and what an operator pads with."""


def run_on_rows(
    func: Any, window: RowWindow, axes: tuple[Axis, Axis], span: tuple[int, int], x: Tensor, *args: Any
) -> Any:
    """Return what `func` gives for a chunk of the rows of its input; of several tensors the first counts.

    Args:
        func: operator of ATen on pictures.
        axes: axis of the input, and that of the result.
        span: start and length of the chunk.
        x: chunk of the input, of shape (B, C, rows, ...).
        args: other arguments of `func`, for whole pictures.
    """
    if window.factor > 1:
        return func(x, [x.shape[ROWS] * window.factor, *args[0][1:]], *args[1:])
    place = window.place(*axes, *span)
    if not window.padding:
        return _cut(func(x, *args), 0, place.rows)
    at, filler = _PADDINGS[func]
    inside = (*args[:at], [0, *args[at][1:]], *args[at + 1 :])
    if not place.above and not place.below:
        return _cut(func(x, *inside), 0, place.rows)
    if place.behind % window.stride == 0:  # padded on both sides, what is made of the wrong side is left out
        return _cut(func(x, *args), place.behind // window.stride, place.rows)
    sides = [0] * (2 * (x.dim() - ROWS - 1))
    padded = functional.pad(x, [*sides, place.above, place.below], value=filler)
    return _cut(func(padded, *inside), 0, place.rows)


def _cut(results: Any, first: int, rows: int) -> Any:
    """Return `rows` rows from `first` on, of the first of several results."""
    if not isinstance(results, Tensor):
        return (_cut(results[0], first, rows), *results[1:])
    return results if results.shape[ROWS] == rows else results.narrow(ROWS, first, rows)
