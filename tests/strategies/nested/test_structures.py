"""What holds tensors is made anew for each recomputation, as the call has found it."""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strategies.ac.nested import Nested
from strategies.nested.structures import put_together, taken_apart


class _Slots:
    __slots__ = ("__hidden", "counts")

    def __init__(self) -> None:
        self.counts = [0]
        self.__hidden = 0

    def count(self) -> int:
        """Count a call."""
        self.__hidden += 1
        self.counts.append(self.__hidden)
        return self.__hidden


@dataclass(slots=True, frozen=True)
class _Frozen:
    counts: list[int]


class _List(list[int]):
    """A list with an attribute."""

    name = "none"


class _Word(str):  # noqa: SLOT000 (its attribute is what is tested)
    """A string with an attribute."""

    calls = 0


def _counts_attribute(value: Any) -> int:
    value.calls = getattr(value, "calls", 0) + 1
    return int(value.calls)


def _counts_first(value: Any) -> int:
    value[0] += 1
    return int(value[0])


def _appends(value: Any) -> int:
    value.append(len(value))
    return len(value)


def _adds(value: set[int]) -> int:
    value.add(len(value))
    return len(value)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "a namespace": (SimpleNamespace, _counts_attribute),
    "slots": (_Slots, lambda value: int(value.count())),
    "frozen slots": (lambda: _Frozen([]), lambda value: _appends(value.counts)),
    "a deque": (lambda: deque([7], maxlen=5), _appends),
    "a set": (set, _adds),
    "a list of another class": (_List, _appends),
    "an array of NumPy": (lambda: np.zeros(1), _counts_first),
    "a bytearray": (lambda: bytearray(1), _counts_first),
    "an array of Python": (lambda: array("i", [0]), _counts_first),
    "an array of objects": (lambda: np.array([0, None], dtype=object), _counts_first),
    "a generator of NumPy": (lambda: np.random.default_rng(3), lambda value: int(value.integers(1000))),
    "an old generator of NumPy": (
        lambda: np.random.RandomState(3),
        lambda value: int(value.randint(1000)),
    ),
    "a generator of Python": (lambda: random.Random(3), lambda value: value.randrange(1000)),
    "a generator of torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda value: int(torch.randint(1000, (), generator=value)),
    ),
    "a generator under two names": (
        lambda: {name: each for each in [random.Random(3)] for name in "ab"},
        lambda value: value["a"].randrange(1000) - value["b"].randrange(1000),
    ),
    "a string with an attribute": (lambda: _Word("word"), _counts_attribute),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_call_changes_is_as_it_was(make: Callable[[], Any], change: Callable[[Any], int]) -> None:
    value = make()
    leaves: list[Any] = []
    structure = taken_apart(value, leaves)
    first = change(value)
    for _ in range(2):
        again = put_together(structure, leaves)
        assert type(again) is type(value)
        assert again is not value
        assert change(again) == first


class _Layer(nn.Module):
    def __init__(self, change: Callable[[Any], int]) -> None:
        super().__init__()
        self.up, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor, value: Any) -> Tensor:
        result: Tensor = x + torch.tanh(self.up(x)) * self.change(value)
        return result


class _Layers(nn.Module):
    def __init__(self, make: Callable[[], Any], change: Callable[[Any], int]) -> None:
        super().__init__()
        self.make, self.blocks = make, nn.ModuleList(_Layer(change) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        value = self.make()
        for block in self.blocks:
            x = block(x, value)
        return x


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_gradients_are_those_of_the_plain_model(
    make: Callable[[], Any], change: Callable[[Any], int]
) -> None:
    torch.manual_seed(0)
    plain, x = _Layers(make, change), torch.randn(2, 4)
    model = Nested(layers_fqn="blocks").apply(copy.deepcopy(plain))
    for each in (plain, model):
        each(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(other.grad, one.grad)
