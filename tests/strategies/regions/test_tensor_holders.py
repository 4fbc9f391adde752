"""Holders of tensors: what is found in modules, and when it is looked for again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies.regions.outside_tensors import OutsideTensors
from strategies.regions.rewind import all_modules
from strategies.regions.tensor_holders import TensorHolders, names_of


class Holding(nn.Module):
    """Holds tensors in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("buffer", torch.zeros(1))
        self.attribute, self.later = torch.zeros(1), None
        self.listed, self.named, self.numbers = [torch.zeros(1)], {"a": torch.zeros(1)}, list(range(99))
        self.hidden = [nn.Linear(1, 1)]


def test_tensors_are_found_by_kind() -> None:
    module = Holding()
    parts = all_modules(module)
    holders = TensorHolders(module, parts)
    assert holders.parameters(parts) == [module.linear.weight, module.linear.bias]
    state = [module.buffer, module.attribute, module.listed[0], module.named["a"]]
    assert [*map(id, holders.state(parts))] == [*map(id, state)]
    assert holders.others(parts) == [module.hidden[0].weight, module.hidden[0].bias]
    named: list[Any] = [*state, module.linear.bias]
    assert [next(names_of(each, module), "") for each in named] == [
        "buffer",
        "attribute",
        "listed",
        "named",
        "linear.bias",
    ]


def _parameter_of(module: nn.Module, name: str) -> None:
    value = getattr(module, name)
    delattr(module, name)
    module.register_parameter(name, nn.Parameter(value))


CHANGES: dict[str, tuple[bool, Callable[[Any], object]]] = {
    "nothing": (True, lambda _: None),
    "an attribute that was None": (True, lambda module: setattr(module, "later", torch.zeros(1))),
    "another attribute": (False, lambda module: setattr(module, "more", torch.zeros(1))),
    "a parameter": (False, lambda module: setattr(module, "scale", nn.Parameter(torch.zeros(1)))),
    "a parameter in place of an attribute": (False, lambda module: _parameter_of(module, "attribute")),
    "a buffer": (False, lambda module: module.register_buffer("more", torch.zeros(1))),
    "another module in place of one": (False, lambda module: setattr(module, "linear", nn.Linear(1, 1))),
    "another class": (False, lambda module: setattr(module, "__class__", type("Other", (Holding,), {}))),
}


@pytest.mark.parametrize(("is_same", "change"), CHANGES.values(), ids=CHANGES)
def test_holders_are_known_until_modules_hold_others(
    *, is_same: bool, change: Callable[[Any], object]
) -> None:
    module = Holding()
    holders = TensorHolders(module, all_modules(module))
    count = len(holders.state(all_modules(module)))
    change(module)
    assert holders.are_of(all_modules(module)) is is_same
    found = holders.state(all_modules(module)) if is_same else []
    assert len(found) in {0, count + (module.later is not None)}


def test_a_module_is_freed_with_its_last_reference() -> None:
    module, outside = Holding(), OutsideTensors()
    vars(module)["region"] = outside
    outside.found_by(module, ()).end()
    reference = weakref.ref(module)
    del module
    assert reference() is None
