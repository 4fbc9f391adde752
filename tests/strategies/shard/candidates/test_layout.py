"""Placements as shapes, texts and slices."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies import StrategyError
from strategies.shard.candidates.layout import (
    Placements,
    grouped_sequence,
    local_part,
    local_shape,
    sharding_sequence,
)

R = Replicate()
LAYOUTS: dict[str, tuple[Placements, tuple[int, ...], tuple[str, ...]]] = {
    "replicated": ((R, R), (8, 6), ("R", "R")),
    "one axis": ((R, Shard(1)), (8, 2), ("R", "S1")),
    "two axes, two dimensions": ((Shard(1), Shard(0)), (2, 3), ("S1", "S0")),
    "two axes, one dimension": ((Shard(0), Shard(0)), (1, 6), ("S01", "R")),
    "partial is whole": ((Partial(), Shard(0)), (2, 6), ("S1", "R")),
}


@pytest.mark.parametrize(("placements", "shape", "sequence"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(placements: Placements, shape: tuple[int, ...], sequence: tuple[str, ...]) -> None:
    mesh_shape = (2, 3) if placements[1] == Shard(1) else (2, 4)
    assert local_shape((8, 6), placements, mesh_shape) == shape
    assert sharding_sequence(placements, 2) == sequence


def test_dimensions_seen_as_one_gather_their_axes() -> None:
    assert grouped_sequence((Shard(1), Shard(0)), ((0, 1), (2,))) == ("S01", "R")


def test_the_left_axis_cuts_first() -> None:
    whole = torch.arange(8)
    parts = [
        local_part(whole, (Shard(0), Shard(0)), (2, 2), (i, j)).tolist() for i in range(2) for j in range(2)
    ]
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_uneven_cuts_are_refused() -> None:
    with pytest.raises(StrategyError) as error:
        local_shape((4, 6), (Shard(1), R), (4, 2))
    assert str(error.value) == "placements: dimension 1 of (4, 6) cannot be cut into 4 even shards"
