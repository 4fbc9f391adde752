"""What changes between a module's forward and the end of the model's is named, by kind."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from itertools import cycle
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.measure.probes.changed_since import changed_since
from tests.toy_trainee import toy_batches, toy_trainee

SCALE = ContextVar("scale", default=1.0)
SWITCH = {"gain": 1.0}


class Layer(nn.Module):
    """A linear that reads what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.temperature, self.active, self.kept = 1.0, "first", torch.ones(())
        self.register_buffer("ema", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x) * SWITCH["gain"] * SCALE.get()
        return outputs


class Model(nn.Module):
    """One layer, and what happens before and after it."""

    def __init__(self, before: Callable[[Any], object], after: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = Layer()
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        self.before(self.layer)
        outputs: Tensor = self.layer(x)
        self.after(self.layer)
        return outputs


def _nothing(_layer: Any) -> None:
    """Change nothing."""


def _setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


CASES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], set[tuple[str, str]]]] = {
    "nothing": (_nothing, _nothing, set()),
    "before only": (_setting("temperature", 2.0), _nothing, set()),
    "a number": (_nothing, _setting("temperature", 2.0), {("attribute", "layer.temperature")}),
    "a number that was not there": (_nothing, _setting("ready", 2.0), {("attribute", "layer.ready")}),
    "a word": (_setting("active", "second"), _setting("active", "first"), {("word", "layer.active")}),
    "an iterator": (_setting("gains", cycle((1, 2))), _nothing, {("iterator", "layer.gains")}),
    "a tensor": (_nothing, lambda layer: layer.kept.add_(1), {("attribute", "layer.kept")}),
    "a buffer": (_nothing, lambda layer: layer.ema.add_(1), {("buffer", "layer.ema")}),
    "weights": (
        _nothing,
        lambda layer: layer.linear.weight.data.add_(1) is layer.linear.bias.detach().add_(1),
        {("weight", "layer.linear.weight"), ("weight", "layer.linear.bias")},
    ),
    "a mode": (
        _nothing,
        lambda layer: layer.linear.eval(),
        {("mode", "layer.linear.training")},
    ),
    "a global": (
        lambda _layer: SWITCH.update(gain=4.0),
        lambda _layer: SWITCH.update(gain=1.0),
        {("global", f"{__name__}.SWITCH")},
    ),
    "a context variable": (
        lambda _layer: SCALE.set(4.0),
        lambda _layer: SCALE.set(1.0),
        {("context", f"{__name__}.SCALE")},
    ),
    "a hook of a weight": (
        lambda layer: layer.linear.weight.register_hook(torch.clone),
        _nothing,
        {("gradient hook", "layer.linear.weight")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_names_what_changes(case: str) -> None:
    before, after, expected = CASES[case]
    trainee = toy_trainee(lambda: Model(before, after))
    (batch,) = toy_batches(1, 4, 8)
    found = changed_since(trainee, batch, seed=0, device=torch.device("cpu"))
    assert {(change.kind, change.name) for change in found} == expected
    assert not trainee.model._forward_pre_hooks


def test_an_input_that_is_changed_in_place_is_named() -> None:
    trainee = toy_trainee(lambda: nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.ReLU(inplace=True)))
    (batch,) = toy_batches(1, 4, 8)
    found = changed_since(trainee, batch, seed=0, device=torch.device("cpu"))
    assert [(change.kind, change.name) for change in found] == [("input", "input 0 of 2")]


class Taking(Layer):
    """A layer that changes a value that it is given."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, value: Any = None) -> Tensor:
        self.change(value)
        outputs: Tensor = self.linear(x)
        return outputs


class Giving(nn.Module):
    """A model that gives its layer a value."""

    def __init__(self, make: Callable[[], Any], change: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer, self.make = Taking(change), make

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x, self.make())
        return outputs


def _counts(value: Any) -> None:
    value[len(value) // 2] += 1


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "an array": (lambda: np.zeros(1), _counts),
    "a large array": (lambda: np.zeros(5000), _counts),
    "a bytearray": (lambda: bytearray(3), _counts),
    "a generator of NumPy": (lambda: np.random.default_rng(3), lambda value: value.random()),
    "a generator of torch": (torch.Generator, lambda value: torch.rand((), generator=value)),
    "a generator of Python": (lambda: Random(3), lambda value: value.random()),
    "an array in a dictionary": (lambda: {"counts": np.zeros(1)}, lambda value: _counts(value["counts"])),
    "a list in a tuple": (lambda: ([],), lambda value: value[0].append(1)),
    "a list": (list, lambda value: value.append(1)),
}


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_is_changed_is_named(case: str, is_changed: bool) -> None:
    make, change = ARGUMENTS[case]
    trainee = toy_trainee(lambda: Giving(make, change if is_changed else _nothing))
    (batch,) = toy_batches(1, 4, 8)
    found = changed_since(trainee, batch, seed=0, device=torch.device("cpu"))
    assert [each.name for each in found] == ["argument 'value' of layer"] * is_changed
