"""selective_layer: which blocks, always counted in this model."""

from __future__ import annotations

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
