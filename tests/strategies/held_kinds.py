"""Objects of every kind that a module may hold, and one change of each."""

from __future__ import annotations

import functools
import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


class Slotted:
    """An object without a dictionary, one of whose slots is empty."""

    __slots__ = ("__secret", "calls", "empty")

    empty: int

    def __init__(self) -> None:
        self.calls = 0
        self.__secret = [0]

    def bump(self) -> None:
        """Change what the private slot holds."""
        self.__secret[0] += 1


@dataclass(slots=True)
class Child(Slotted):
    """A dataclass with slots of its own and of its base."""

    calls: int = 0
    more: int = 0


class Log(list[int]):
    """A list with an attribute, whose methods mean something else."""

    def __init__(self) -> None:
        super().__init__([1])
        self.calls = 0

    def copy(self) -> Any:
        """Refuse."""
        raise AssertionError("a walker has called a user's method")

    clear = extend = __iter__ = copy  # type: ignore[assignment]


class Growing(dict[str, int]):
    """A dictionary that adds in `update`."""

    def update(self, *_args: Any, **_kwargs: Any) -> None:
        """Refuse."""
        raise AssertionError("a walker has called a user's method")

    clear = items = values = keys = __iter__ = update  # type: ignore[assignment]


class Caller:
    """A plain object that can be called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        """Count."""
        self.calls += 1


def nested() -> dict[str, list[Any]]:
    """Return a list in a dictionary in an object in a list in a dictionary."""
    return {"a": [SimpleNamespace(x={"k": [0]})]}


def deeper(held: Any) -> None:
    """Change the innermost of `nested`."""
    held["a"][0].x["k"][0] += 1


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1, 2], lambda held: held.append(3)),
    "long list": (lambda: [0] * 2000, lambda held: held.__setitem__(8, 1)),
    "long list of others": (lambda: [np.float32(0)] * 2000, lambda held: held.__setitem__(8, np.float32(1))),
    "list subclass": (Log, lambda held: list.append(held, 2)),
    "attribute of a list subclass": (Log, lambda held: setattr(held, "calls", 1)),
    "tuple of lists": (lambda: ([0], [1]), lambda held: held[1].append(2)),
    "deque of a length": (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "dictionary": (lambda: dict.fromkeys(range(128), 0), lambda held: held.update({8: 1})),
    "long dictionary": (lambda: dict.fromkeys(range(2000), 0), lambda held: held.update({8: 1})),
    "dictionary subclass": (lambda: Growing(a=1), lambda held: held.__setitem__("a", held["a"] + 1)),
    "counter": (lambda: Counter("aab"), lambda held: held.update("ab")),
    "defaultdict": (lambda: defaultdict(int), lambda held: held["new"]),
    "order of a dictionary": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "set": (lambda: {0}, lambda held: (held.clear(), held.add(1))),
    "array": (lambda: np.ones(2), lambda held: held.__iadd__(1)),
    "array of objects": (lambda: np.array([[], None], dtype=object), lambda held: held[0].append(1)),
    "bytearray": (lambda: bytearray(b"ab"), lambda held: held.extend(b"c")),
    "array of Python": (lambda: array("d", [1.0]), lambda held: held.append(2.0)),
    "object": (lambda: SimpleNamespace(calls=0), lambda held: setattr(held, "calls", 1)),
    "object that can be called": (Caller, lambda held: held()),
    "slots": (Slotted, lambda held: setattr(held, "calls", held.calls + 1)),
    "private slot": (Slotted, lambda held: held.bump()),
    "slots of a subclass": (Child, lambda held: setattr(held, "more", 1)),
    "empty slot": (Slotted, lambda held: setattr(held, "empty", 1)),
    "deep": (nested, deeper),
    "method of an object": (lambda: Slotted().bump, lambda held: held()),
    "partial": (lambda: functools.partial(dict, by=[0]), lambda held: held.keywords["by"].append(1)),
    "generator of Python": (lambda: random.Random(0), lambda held: held.random()),
    "generator of NumPy": (lambda: np.random.default_rng(0), lambda held: held.random()),
    "old generator of NumPy": (lambda: np.random.RandomState(0), lambda held: held.rand()),
    "generator of torch": (
        lambda: torch.Generator().manual_seed(0),
        lambda held: torch.rand(1, generator=held),
    ),
}
