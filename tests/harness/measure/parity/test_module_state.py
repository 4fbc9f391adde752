from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.measure.parity.checksum import checksum
from harness.measure.parity.module_state import StateChanges, module_state
from tests.strategies.held_kinds import HELD, Slotted


class Statistics:
    """A plain object of a user."""

    def __init__(self) -> None:
        self.seen = 3


class Color(Enum):
    """A choice of a user."""

    RED = 1


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


def counting() -> Callable[[], None]:
    """Return a function that keeps a number to itself."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    return count


def tagged() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(1))
    parameter.tag = []  # type: ignore[attr-defined]
    return parameter


def slotted() -> Slotted:
    held = Slotted()
    held.calls = torch.ones(1)  # type: ignore[assignment]
    return held


def deep(depth: int) -> list[Any]:
    return [deep(depth - 1)] if depth else []


def compared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state that has an equality."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in state.items()}


def names(value: Any) -> list[str]:
    return [name for name in module_state(Holder(value)).values if name != "training"]


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
        pytest.param({1, 2}, ["length of held", "held"], id="a set"),
        pytest.param([0] * 1001, ["length of held", "held"], id="of what is long a digest"),
        pytest.param(Statistics(), ["held.seen"], id="a plain object"),
        pytest.param(torch.Generator(), ["held"], id="a generator of torch"),
        pytest.param(random.Random(0), ["held", "held.gauss_next"], id="a generator of Python"),
        pytest.param(np.random.default_rng(0), ["held"], id="a generator of NumPy"),
        pytest.param(lambda: 1, [], id="a function"),
        pytest.param(torch.device("cpu"), ["held"], id="a device"),
        pytest.param(torch.ones(1, device="meta"), [], id="a tensor without memory"),
        pytest.param(freed(), [], id="a tensor whose memory is freed"),
        pytest.param(torch.ones(0), ["held"], id="a tensor without elements"),
        pytest.param(torch.eye(2).to_sparse(), ["held"], id="a sparse tensor"),
    ],
)
def test_what_a_module_holds_is_named(value: Any, expected: list[str]) -> None:
    assert names(value) == expected


_LOCAL: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "number": (Statistics, lambda held: setattr(held, "seen", 4)),
    "enclosed in a function": (counting, lambda held: held()),
    "attribute of a tensor": (tagged, lambda held: held.tag.append(1)),
    "counter of itertools": (itertools.count, next),
    "tensor in slots in a list": (lambda: [slotted()], lambda held: held[0].calls.add_(1)),
    "parameter of a module in a list": (
        lambda: [nn.Linear(1, 1)],
        lambda held: held[0].weight.data.zero_(),
    ),
    "buffer of a module in a list": (
        lambda: [nn.BatchNorm1d(1)],
        lambda held: held[0].running_mean.add_(1),
    ),
}


@pytest.mark.parametrize("name", [*HELD, *_LOCAL])
def test_a_change_of_any_kind_is_seen(name: str) -> None:
    make, change = (HELD | _LOCAL)[name]
    torch.manual_seed(0)
    model = Holder(make())
    found = module_state(model)
    torch.manual_seed(0)
    assert compared(found.values) == compared(module_state(Holder(make())).values)
    before = compared(found.values)
    changes = StateChanges(model)
    change(model.held)
    now = module_state(model)
    assert changes.names(now.values)
    assert compared(now.values) != before
    assert (found.uncompared, now.uncompared) == ((), ())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(threading.Lock(), "held (lock)", id="a lock"),
        pytest.param(iter([1]), "held (list_iterator)", id="an iterator"),
        pytest.param({"log": logging.getLogger("a")}, "held['log'] (Logger)", id="a logger"),
        pytest.param(torch.optim.SGD([torch.ones(1)]), "held (SGD)", id="an object of torch"),
        pytest.param({Statistics()}, "members of held", id="objects in a set"),
        pytest.param(deep(40), f"held{'[0]' * 32} (list)", id="too deep"),
    ],
)
def test_what_nothing_can_be_read_of_is_named(value: Any, expected: str) -> None:
    assert module_state(Holder(value)).uncompared == (expected,)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.relu, torch.nn.functional.gelu, len, np.exp, torch.Tensor.relu, Statistics, math, object()),
        *(Path("a"), Fraction(1), PosixPath("a"), torch.float32, Color.RED, slice(1), float("nan")),
        WithExtraState(),
    ],
)
def test_what_holds_nothing_of_a_model_is_not_named(value: Any) -> None:
    assert module_state(Holder([value])).uncompared == ()


def test_a_number_among_many_is_digested_by_its_value() -> None:
    one = [f"{number}" for number in (1, 1) * 600]
    other = ["1"] * 1200
    assert module_state(Holder(one)).values == module_state(Holder(other)).values


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
    assert changes.names(module_state(model).values) == (frozenset({"held"}) if is_seen else frozenset())


def test_submodules_and_extra_state_have_paths() -> None:
    model = nn.ModuleDict({"inner": WithExtraState()})
    assert {name: value for name, value in module_state(model).values.items() if "training" not in name} == {
        "length of inner.(extra state)": 1,
        "inner.(extra state)['calls']": 2,
    }


def test_a_circle_ends() -> None:
    held: list[Any] = []
    held.append(held)
    assert names(held) == ["length of held"]


def test_what_hooks_enclose_is_state() -> None:
    seen: list[int] = []
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(count)
    model[0].register_forward_pre_hook(lambda _module, inputs: seen.append(len(inputs)))
    changes = StateChanges(model)
    model(torch.ones(1))
    changed = changes.names(module_state(model).values)
    assert changed == {
        "0.forward hook 0.calls",
        "length of 0.forward pre-hook 0.seen",
        "0.forward pre-hook 0.seen[0]",
    }


def test_a_storage_that_was_summed_up_can_be_resized() -> None:
    tensor = torch.arange(4.0)
    assert checksum(tensor) == checksum(tensor.clone()) != checksum(tensor + 1)
    assert checksum(tensor[:0]) == 0
    tensor.untyped_storage().resize_(0)
