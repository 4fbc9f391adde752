"""States of Python's and NumPy's generators are read once, and anew as soon as somebody has drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from strategies.regions.number_generators import NumberGenerators


@pytest.fixture(autouse=True)
def _same_generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    yield
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002


def _states() -> tuple[object, str]:
    return random.getstate(), str(np.random.get_state())  # noqa: NPY002


DRAWS: dict[str, Callable[[], object]] = {
    "a number of Python's": random.random,
    "a normal number of Python's": lambda: random.gauss(0, 1),
    "a second normal number of Python's": lambda: (random.gauss(0, 1), random.gauss(0, 1)),
    "a seed of Python's": lambda: random.seed(1),
    "a shuffle": lambda: random.shuffle([1, 2, 3]),
    "a number of NumPy's": lambda: np.random.rand(),  # noqa: NPY002, PLW0108
    "a normal number of NumPy's": lambda: np.random.randn(),  # noqa: NPY002, PLW0108
    "a second normal number of NumPy's": lambda: np.random.randn(2),  # noqa: NPY002
    "a seed of NumPy's": lambda: np.random.seed(1),  # noqa: NPY002
    "a thousand numbers of both": lambda: (np.random.rand(999), [random.random() for _ in range(999)]),  # noqa: NPY002
}


def test_states_that_are_still_there_are_not_read_again() -> None:
    generators = NumberGenerators()
    states = generators.states()
    assert generators.states() is states
    assert all(each.is_current() for each in states)


@pytest.mark.parametrize(
    ("before", "draw"), [(before, draw) for before in (None, *DRAWS) for draw in DRAWS if before != draw]
)
def test_whoever_draws_is_seen_and_undone(before: str | None, draw: str) -> None:
    generators = NumberGenerators()
    generators.states()
    if before is not None:
        DRAWS[before]()
    then, states = _states(), generators.states()
    DRAWS[draw]()
    assert generators.states() is not states
    for each in states:
        each.put()
    assert _states() == then


def test_a_normal_number_that_waits_is_drawn_again() -> None:
    generators = NumberGenerators()
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    then, states = _states(), generators.states()
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    assert generators.states() is not states
    for each in states:
        each.put()
    assert _states() == then
