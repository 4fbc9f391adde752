"""selective_layer: which blocks, always counted in this model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from strategies import StrategyError
from strategies.ac.selective_layer import SelectiveLayer
from strategies.regions.region import regions

CHOSEN = {
    1: ["0", "1", "2", "3", "4", "5", "6"],
    2: ["1", "3", "5"],
    3: ["2", "5"],
    7: ["6"],
    8: [],
}


@pytest.mark.parametrize(("ac_freq", "expected"), CHOSEN.items(), ids=lambda v: f"{v}")
def test_blocks_k_minus_1_and_every_kth_after(ac_freq: int, expected: list[str]) -> None:
    for _ in range(2):  # the second model in the process is treated as the first
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(7))
        SelectiveLayer(layers_fqn="layers", ac_freq=ac_freq).apply(model)
        assert list(regions(model)) == [f"layers.{index}" for index in expected]


def stack(count: int) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    return model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"first": 1}, ["0"], id="the first"),
        pytest.param({"first": 3}, ["0", "1", "2"], id="the first three"),
        pytest.param({"last": 2}, ["5", "6"], id="the last two"),
        pytest.param({"last": 7}, ["0", "1", "2", "3", "4", "5", "6"], id="as many as there are"),
        pytest.param({"layers": [5, 0, 3]}, ["0", "3", "5"], id="some by number, in order"),
    ],
)
def test_blocks_by_number(options: dict[str, Any], expected: list[str]) -> None:
    model = stack(7)
    SelectiveLayer(layers_fqn="layers", **options).apply(model)
    assert list(regions(model)) == [f"layers.{index}" for index in expected]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "none of the first": ({"first": 0}, "ac.first: must be at least 1, got 0"),
    "fewer than none": ({"last": -1}, "ac.last: must be at least 1, got -1"),
    "a number for a list": ({"layers": 3}, "ac.layers: must be a list of numbers of blocks, from 0, got 3"),
    "a switch for a number": (
        {"layers": [True]},
        "ac.layers: must be a list of numbers of blocks, from 0, got [True]",
    ),
    "from the end": ({"layers": [-1]}, "ac.layers: must be a list of numbers of blocks, from 0, got [-1]"),
    "twice": ({"layers": [1, 0, 1]}, "ac.layers: must name each block once, got [1, 0, 1]"),
    "first and last": (
        {"first": 1, "last": 1},
        "ac: give one of ac.first and ac.last: each chooses the blocks by itself",
    ),
    "a distance and numbers": (
        {"ac_freq": 3, "layers": [1]},
        "ac: give one of ac.ac_freq and ac.layers: each chooses the blocks by itself",
    ),
    "more than there are": (
        {"first": 8},
        "ac.first: is 8, and the model has 7 blocks; use at most 7, or ac=full",
    ),
    "more of the last": (
        {"last": 9},
        "ac.last: is 9, and the model has 7 blocks; use at most 7, or ac=full",
    ),
    "a block that is not there": (
        {"layers": [2, 7]},
        "ac.layers: names block 7, and the model has blocks 0 to 6",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_choice_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        SelectiveLayer(layers_fqn="layers", **options).apply(stack(7))
    assert str(error.value) == message


@pytest.mark.parametrize("ac_freq", [0, -1])
def test_a_distance_below_one_is_refused(ac_freq: int) -> None:
    with pytest.raises(StrategyError) as error:
        SelectiveLayer(ac_freq=ac_freq)
    assert str(error.value) == f"ac.ac_freq: must be at least 1, got {ac_freq}"


def test_a_call_site_is_refused() -> None:
    with pytest.raises(StrategyError) as error:
        SelectiveLayer().call_site(torch.nn.Linear(2, 2))
    assert str(error.value) == (
        "wrap_order: call_site makes the model one region, "
        "and selective_layer chooses among blocks; use ac=full"
    )
