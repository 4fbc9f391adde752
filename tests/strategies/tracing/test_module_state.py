"""State: what counts as the same, and what is found to have changed."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies import generators
from strategies.tracing.module_state import SideEffects, frozen, held_by, kind_of_tensor, restored_generators


@dataclass
class Options:
    scale: float
    more: Any = None


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def draw(self) -> float:
        """Draw a number."""
        return self.generator.random()


def _drawing(seed: int) -> Callable[[], float]:
    generator = random.Random(seed)
    return lambda: generator.random() + 1.0


ONE = nn.Linear(2, 2)
DRAWS = random.Random(0)
LIST: list[Any] = [1]

EQUAL: dict[str, tuple[Any, Any, bool]] = {
    "equal numbers": (1.5, 1.5, True),
    "other numbers": (1, 2, False),
    "a number of another type": (1, 1.0, False),
    "a switch and a number": (True, 1, False),
    "one nan": (np.nan, np.nan, True),
    "equal lists": ([1, (2, "a")], [1, (2, "a")], True),
    "a longer list": ([1], [1, 2], False),
    "a list and a tuple": ([1], (1,), False),
    "equal dictionaries": ({"a": [1]}, {"a": [1]}, True),
    "dictionaries in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
    "equal sets": ({1, 2}, {2, 1}, True),
    "queues": (deque([1]), deque([2]), False),
    "one module": (ONE, ONE, True),
    "modules that are alike": (nn.Linear(2, 2), nn.Linear(2, 2), False),
    "one function": (torch.sin, torch.sin, True),
    "objects that are alike": (Options(1.0), Options(1.0), False),
    "equal arrays": (np.ones(2), np.ones(2), True),
    "other arrays": (np.ones(2), np.array([1.0, 2.0]), False),
    "arrays of objects": (np.array([None, 1]), np.array([None, 2]), False),
    "bytes that may change": (bytearray(b"a"), bytearray(b"b"), False),
    "functions with other arguments": (partial(max, 1), partial(max, 2), False),
    "zeros of another sign": (0.0, -0.0, False),
    "two not numbers": (float("nan"), float("nan"), True),
    "generators elsewhere": (random.Random(1), random.Random(2), False),
    "methods of one generator": (DRAWS.random, DRAWS.random, True),
    "methods of generators elsewhere": (random.Random(1).random, random.Random(2).random, False),
    "methods of objects elsewhere": (_Drawing(1).draw, _Drawing(2).draw, False),
    "functions that enclose generators elsewhere": (_drawing(1), _drawing(2), False),
    "generators of an array elsewhere": (np.random.default_rng(1), np.random.default_rng(2), False),
}


@pytest.mark.parametrize(("before", "now", "is_equal"), EQUAL.values(), ids=EQUAL)
def test_frozen(before: Any, now: Any, is_equal: bool) -> None:
    assert (frozen(before) == frozen(now)) is is_equal


def test_an_object_is_the_same_until_an_attribute_is_another() -> None:
    options = Options(1.0, more={"a": LIST})
    before = frozen(options)
    assert frozen(options) == before
    options.more["a"] = [2]
    assert frozen(options) != before


def test_objects_in_objects_are_looked_into() -> None:
    options = Options(1.0, more=Options(2.0))
    options.more.more = options  # which must come to an end
    before = frozen(options)
    assert frozen(options) == before
    options.more.scale = 3.0
    assert frozen(options) != before


def test_loggers_are_not_looked_into() -> None:
    log = logging.getLogger("an attribute")
    before = frozen(log)
    log.setLevel(3)
    assert frozen(log) == before


def test_tensors_are_compared_as_asked() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert frozen([zeros]) != frozen([ones])
    assert frozen([zeros], kind_of_tensor) == frozen([ones], kind_of_tensor)
    assert frozen(zeros, kind_of_tensor) != frozen(zeros.double(), kind_of_tensor)


def test_what_a_module_holds_is_read_without_running_it() -> None:
    module: Any = nn.BatchNorm1d(2)
    assert held_by(module, "eps") == module.eps
    assert held_by(module, "weight") is module.weight
    assert held_by(module, "running_mean") is module.running_mean
    assert held_by(module, "forward") is None


def test_generators_of_modules_are_put_back() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module[0].numpy, module.words = np.random.default_rng(0), ["a"] * 3
    module.held = {
        "python": [random.Random(0)],
        "config": SimpleNamespace(torch=torch.Generator().manual_seed(0)),
    }
    module.methods = [random.Random(0).random, _Drawing(1).draw, _drawing(2), partial(_Drawing(3).draw)]
    drawn: list[tuple[Any, ...]] = []
    for _ in range(2):
        with restored_generators(module.modules()):
            python, config = module.held["python"][0], module.held["config"]
            drawn.append(
                (module[0].numpy.random(), python.random(), torch.rand(1, generator=config.torch).item())
            )
            drawn[-1] += tuple(draw() for draw in module.methods)
    assert drawn[0] == drawn[1]


def with_list(model: Any) -> None:
    model.outer.notes.append(1)


CHANGES: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "nothing": (lambda model: model.outer.inner.weight, None),
    "an attribute": (lambda model: setattr(model.outer.inner, "flag", 1), "sets 'outer.inner.flag'"),
    "an attribute set to what it was": (lambda model: setattr(model, "count", 0), None),
    "an attribute taken away": (lambda model: delattr(model, "count"), "sets 'count'"),
    "a parameter": (
        lambda model: setattr(model.outer.inner, "weight", nn.Parameter(torch.ones(1))),
        "sets 'outer.inner.weight'",
    ),
    "a submodule": (lambda model: setattr(model.outer, "inner", nn.Identity()), "sets 'outer.inner'"),
    "a list": (with_list, "changes what 'outer.notes' holds"),
    "an object": (lambda model: setattr(model.options, "scale", 2), "changes what 'options' holds"),
    "a generator behind a method": (lambda model: model.draw(), "changes what 'draw' holds"),
    "a generator behind a method of Python": (lambda model: model.method(), "changes what 'method' holds"),
    "a generator that a function encloses": (
        lambda model: model.enclosing(),
        "changes what 'enclosing' holds",
    ),
    "Python's generator": (lambda _: random.random(), "draws random numbers that are not torch's"),
    "NumPy's generator": (lambda _: np.random.rand(), "draws random numbers that are not torch's"),  # noqa: NPY002
    "torch's generator": (lambda _: torch.manual_seed(1), "sets torch's random number generator"),
    "a value": (lambda model: model.outer.inner.weight.data.zero_(), None),
}


@pytest.mark.parametrize(("change", "phrase"), CHANGES.values(), ids=CHANGES)
def test_effects_are_found_once(change: Callable[[Any], Any], phrase: str | None) -> None:
    model: Any = nn.Module()
    model.outer = nn.Module()
    model.outer.inner = nn.Linear(2, 2)
    model.outer.notes = []
    model.options = SimpleNamespace(scale=1)
    model.count = 0
    model.draw, model.method, model.enclosing = random.Random(1).random, _Drawing(2).draw, _drawing(3)
    with generators.restored():
        effects = SideEffects(dict(model.named_modules()))
        effects.forgive("")
        assert effects.found("") is None
        change(model)
        assert effects.found("") == phrase
        effects.forgive("")
        assert effects.found("") is None
