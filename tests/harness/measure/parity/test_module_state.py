from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.measure.parity.module_state import StateChanges, module_state


class Statistics:
    """A plain object of a user."""

    def __init__(self) -> None:
        self.seen = 3


class Holder(nn.Module):
    """A module with one attribute, and one inside a submodule."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.held = value
        self._acbench_region = object()


class WithExtraState(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 2}


def freed() -> Tensor:
    """Return a view of a storage without memory, as FSDP1 leaves them."""
    tensor = torch.ones(4)
    view = tensor[1:]
    tensor.untyped_storage().resize_(0)
    return view


def names(value: Any) -> list[str]:
    return [name for name in module_state(Holder(value)) if name != "training"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(3, ["held"], id="a number"),
        pytest.param(None, ["held"], id="nothing yet"),
        pytest.param(torch.ones(2), ["held"], id="a tensor"),
        pytest.param(np.ones(2), ["held"], id="an array"),
        pytest.param([1, torch.ones(1)], ["length of held", "held[0]", "held[1]"], id="a list"),
        pytest.param(deque([1]), ["length of held", "held[0]"], id="a deque"),
        pytest.param({"k": (1,)}, ["length of held", "length of held['k']", "held['k'][0]"], id="nested"),
        pytest.param({1, 2}, ["length of held"], id="a set has a length"),
        pytest.param(list(range(65)), ["length of held"], id="of what is long the length"),
        pytest.param(Statistics(), ["held.seen"], id="a plain object"),
        pytest.param(torch.Generator(), ["held"], id="a generator of torch"),
        pytest.param(random.Random(0), ["held"], id="a generator of Python"),
        pytest.param(np.random.default_rng(0), ["held"], id="a generator of NumPy"),
        pytest.param(lambda: 1, [], id="a function"),
        pytest.param(torch.device("cpu"), [], id="an object of torch"),
        pytest.param(torch.ones(1, device="meta"), [], id="a tensor without memory"),
        pytest.param(freed(), [], id="a tensor whose memory is freed"),
        pytest.param(torch.ones(0), ["held"], id="a tensor without elements"),
        pytest.param(torch.eye(2).to_sparse(), ["held"], id="a sparse tensor"),
    ],
)
def test_what_a_module_holds_is_named(value: Any, expected: list[str]) -> None:
    assert names(value) == expected


@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(lambda: [1], lambda held: held.append(2), id="a list grows"),
        pytest.param(lambda: random.Random(0), lambda held: held.random(), id="a generator draws"),
        pytest.param(lambda: np.random.default_rng(0), lambda held: held.random(), id="one of NumPy"),
        pytest.param(Statistics, lambda held: setattr(held, "seen", 4), id="a number changes"),
    ],
)
def test_a_change_is_seen(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    model = Holder(make())
    before = module_state(model)
    assert before == module_state(Holder(make()))
    changes = StateChanges(model)
    assert changes.names(before) == frozenset()
    change(model.held)
    assert changes.names(module_state(model))
    assert module_state(model) != before


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        pytest.param(lambda _model: None, False, id="nothing"),
        pytest.param(lambda model: model.held.add_(1), True, id="written in place"),
        pytest.param(lambda model: setattr(model, "held", torch.ones(2)), True, id="another tensor"),
        pytest.param(lambda model: setattr(model, "held", None), True, id="none any more"),
        pytest.param(lambda model: delattr(model, "held"), True, id="gone"),
    ],
)
def test_tensors_are_known_by_their_writes(change: Callable[[Holder], Any], is_seen: bool) -> None:
    model = Holder(torch.ones(2))
    changes = StateChanges(model)
    change(model)
    assert changes.names(module_state(model)) == (frozenset({"held"}) if is_seen else frozenset())


def test_submodules_and_extra_state_have_paths() -> None:
    model = nn.ModuleDict({"inner": WithExtraState()})
    assert {name: value for name, value in module_state(model).items() if "training" not in name} == {
        "length of inner.(extra state)": 1,
        "inner.(extra state)['calls']": 2,
    }


def test_a_circle_ends() -> None:
    held: list[Any] = []
    held.append(held)
    assert names(held) == ["length of held"]
