"""Every piece of state that a forward can read is a spot, which is changed and put back."""

from __future__ import annotations

import random
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from harness.measure.probes.spots import spots_of

SCALE = ContextVar("scale", default=2.0)
SWITCH = {"gain": 1.0}
BIAS = 0.5


class Config:
    """Numbers of a model."""

    def __init__(self) -> None:
        self.dropout = 0.1


class Layer(nn.Module):
    """Reads state of each kind."""

    limit = 3.0
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.temperature, self.ready, self.active, self.calls = 0.4, False, "first", 1
        self.table, self.config, self.gains = torch.arange(3), Config(), [1.5, "x"]
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("ema", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x * SWITCH["gain"] * SCALE.get() + BIAS
        return outputs


class _Linear(nn.Linear):
    """A layer of one's own that counts."""

    calls = 0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.calls = 1


def _read(model: Layer) -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy.random": np.random.get_state(legacy=False)["state"]["pos"],  # type: ignore[index]  # noqa: NPY002 (models draw from it)
        "layer.training": model.training,
        "layer.temperature": model.temperature,
        "layer.ready": model.ready,
        "layer.active": model.active,
        "layer.calls": model.calls,
        "layer.table": model.table.tolist(),
        "layer.config.dropout": model.config.dropout,
        "layer.gains[0]": model.gains[0],
        "layer.generator": model.generator.get_state().tolist(),
        "layer.ema": model.ema.tolist(),
        "Layer.limit": Layer.limit,
        f"{__name__}.SWITCH['gain']": SWITCH["gain"],
        f"{__name__}.SCALE": SCALE.get(),
        f"{__name__}.BIAS": BIAS,
    }


KINDS = {
    "random": "generator",
    "layer.training": "mode",
    "layer.temperature": "number",
    "layer.ready": "flag",
    "layer.active": "word",
    "layer.calls": "size",
    "layer.table": "buffer",
    "layer.generator": "generator",
    "layer.ema": "buffer",
    "Layer.limit": "global",
    f"{__name__}.SCALE": "context",
    f"{__name__}.SWITCH['gain']": "global",
}


@pytest.mark.parametrize("name", _read(Layer()))
def test_a_change_reaches_one_piece_of_state_and_is_undone(name: str) -> None:
    model = Layer()
    before = _read(model)
    (spot,) = [each for each in spots_of(model, {"layer": model}) if each.name == name]
    undo = spot.change()
    assert [each for each, value in _read(model).items() if value != before[each]] == [name]
    undo()
    assert _read(model) == before
    assert spot.kind == KINDS.get(name, spot.kind)


def test_what_a_step_has_taken_out_is_not_put_back() -> None:
    model = Layer()
    spots = spots_of(model, {"layer": model})
    undone = [spot.change() for spot in spots if spot.name in {"layer.gains[0]", "layer.calls"}]
    model.gains.clear()
    del model.calls
    for undo in undone:
        undo()
    assert model.gains == []
    assert not hasattr(model, "calls")


def test_a_word_that_chooses_a_module_chooses_another_one() -> None:
    model = Layer()
    (spot,) = [each for each in spots_of(model, {"": model}) if each.name == "active"]
    spot.change()
    assert model.active == "second"


def test_saved_tensors_keep_their_values_and_weights_are_left_alone() -> None:
    model = Layer()
    ema = model.ema
    spots = list(spots_of(model, dict(model.named_modules())))
    undone = [spot.change() for spot in spots]
    assert ema.tolist() == [0.0, 0.0]
    assert not [spot.name for spot in spots if spot.name.endswith(("weight", "bias"))]
    for undo in reversed(undone):
        undo()


def test_integers_of_torchs_own_modules_are_left_alone() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(2, 3)), nn.Dropout(0.5), nn.BatchNorm1d(3), _Linear(2, 2))
    names = {spot.name for spot in spots_of(model, dict(model.named_modules()))}
    assert {"1.p", "1.training", "2.running_mean", "3.calls"} <= names
    left = ("in_features", "out_features", "num_features", "dim", "inplace", "affine")
    assert [name for name in names if not name.startswith("3.") and name.endswith(left)] == []
