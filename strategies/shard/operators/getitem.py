"""`getitem`: `input[index]` with integers, slices, `None` and an ellipsis.

A dimension that is picked from stays whole, one that is taken as a whole may be sharded: `(d + 1)^axes`
candidates for `d` such dimensions where everything divides, those of DTensor's rules for `aten.select` and
`aten.slice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import EllipsisType
from typing import TypeAlias

import torch
from torch import Tensor

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.following import follow
from strategies.shard.candidates.layout import Shape, checked_shape
from strategies.shard.candidates.operation import Choice, LocalOperands, described

Entry: TypeAlias = int | slice | EllipsisType | None
Index: TypeAlias = tuple[Entry, ...]


def candidates(
    input_shape: Sequence[int],
    index: Entry | Index,
    mesh_shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `input[index]`, full replication first.

    Args:
        input_shape: before.
        index: what stands between the brackets.
        mesh_shape: sizes of the mesh axes.
        dtype: of both.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, or the index picks nothing from it.
    """
    shape = checked_shape("input_shape", input_shape)
    entries = index if isinstance(index, tuple) else (index,)
    after = _picked(shape, entries)
    entering, leaving = _labels(shape, entries)
    return follow(
        "getitem",
        [described("input", shape, entering)],
        [described("output", after, leaving, type="output")],
        partial(_getitem, index=entries),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _getitem(local: LocalOperands, *, index: Index) -> Tensor:
    return local.tensors["input"][index]


def _picked(shape: Shape, index: Index) -> Shape:
    """Return the shape of what is picked."""
    wrong = [entry for entry in index if type(entry) not in (int, slice, EllipsisType, type(None))]
    if wrong:
        raise StrategyError("index", f"must hold integers, slices, None and an ellipsis, got {wrong[0]!r}")
    try:
        after = tuple(torch.empty(shape, device="meta")[index].shape)
    except (IndexError, ValueError):  # the latter for a slice that runs backwards
        raise StrategyError("index", f"must fit a tensor of {shape}, got {index}") from None
    if 0 in after:
        raise StrategyError("index", f"must pick something from {shape}, got {index}")
    return after


def _labels(shape: Shape, index: Index) -> tuple[list[Choice], list[Choice]]:
    """Return labels for the dimensions that are taken as a whole."""
    entering: list[Choice] = [None] * len(shape)
    leaving: list[Choice] = []
    dim = 0
    for entry in _explicit(shape, index):
        if entry is None:
            leaving.append(None)
            continue
        if isinstance(entry, slice):
            is_whole = range(*entry.indices(shape[dim])) == range(shape[dim])
            entering[dim] = f"d{dim}" if is_whole else None
            leaving.append(entering[dim])
        dim += 1
    return entering, leaving


def _explicit(shape: Shape, index: Index) -> list[int | slice | None]:
    """Return the index with a slice for every dimension that it leaves out."""
    named = sum(type(entry) in (int, slice) for entry in index)
    left_out = [slice(None)] * (len(shape) - named)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    found: list[int | slice | None] = []
    for entry in index:
        found.extend(left_out if isinstance(entry, EllipsisType) else [entry])
    return found
