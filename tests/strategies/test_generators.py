"""Every generator is read, put back, and told from one that has drawn; a state is read once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from strategies import generators
from strategies.generators import CPU, NUMPY, PYTHON, LatestStates


@pytest.fixture(autouse=True)
def _same_generators() -> Iterator[None]:
    with generators.restored():
        generators.seed(0, CPU)
        yield


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
    latest = LatestStates()
    states = latest.states()
    assert latest.states() is states
    assert all(each.is_current() for each in states)


@pytest.mark.parametrize(
    ("before", "draw"), [(before, draw) for before in (None, *DRAWS) for draw in DRAWS if before != draw]
)
def test_whoever_draws_is_seen_and_undone(before: str | None, draw: str) -> None:
    latest = LatestStates()
    latest.states()
    if before is not None:
        DRAWS[before]()
    then, states = _states(), latest.states()
    DRAWS[draw]()
    assert latest.states() is not states
    for each in states:
        each.put()
    assert _states() == then


def test_a_normal_number_that_waits_is_drawn_again() -> None:
    latest = LatestStates()
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    then, states = _states(), latest.states()
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    assert latest.states() is not states
    for each in states:
        each.put()
    assert _states() == then


HELD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch's": (torch.Generator(), lambda held: torch.rand((), generator=held).item()),
    "Python's": (random.Random(0), random.Random.random),
    "NumPy's": (np.random.default_rng(0), lambda held: held.random()),
    "NumPy's older": (np.random.RandomState(0), lambda held: held.normal()),
}
GLOBAL: dict[str, tuple[generators.Source, Callable[[], Any]]] = {
    "torch": (generators.of_device(CPU), lambda: torch.rand(()).item()),
    "Python": (PYTHON, random.random),
    "NumPy": (NUMPY, np.random.rand),
}


@pytest.mark.parametrize(("held", "draw"), HELD.values(), ids=HELD)
def test_an_object_that_draws_is_put_back(held: Any, draw: Callable[[Any], Any]) -> None:
    before = generators.of_object(held).now()
    assert generators.moved([before]) == []
    first = draw(held)
    assert generators.moved([before]) == [before]
    before.put()
    assert draw(held) == first


def test_numbers_of_the_system_have_no_state() -> None:
    before = generators.of_object(random.SystemRandom()).now()
    before.source.read()
    before.put()
    assert generators.moved([before]) == []


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize(("source", "draw"), GLOBAL.values(), ids=GLOBAL)
def test_all_are_restored(source: generators.Source, draw: Callable[[], Any], fails: bool) -> None:
    before = source.now()

    def scope() -> None:
        with generators.restored():
            draw()
            assert generators.moved([before]) == [before]
            if fails:
                raise ValueError("a step")

    if fails:
        with pytest.raises(ValueError, match="a step"):
            scope()
    else:
        scope()
    assert generators.moved([before]) == []


def test_one_seed_gives_all_the_same_numbers() -> None:
    drawn = []
    for seed in (3, 3, 2**33 + 4):
        generators.seed(seed, CPU)
        drawn.append([draw() for _, draw in GLOBAL.values()])
    assert drawn[0] == drawn[1]
    assert not any(one == other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_an_operator_draws_again_what_it_drew_and_nobody_else_notices() -> None:
    stash = generators.stashed(CPU)
    drawn, before = torch.rand(3), generators.of_device(CPU).now()
    put_back = stash()
    assert torch.equal(torch.rand(3), drawn)
    put_back()
    assert generators.moved([before]) == []


@pytest.mark.parametrize("draws", [False, True], ids=["draws nothing", "draws"])
def test_an_operator_that_draws_is_found_out(*, draws: bool) -> None:
    watch = generators.DrawWatch([CPU, torch.device("meta")])
    drawn = torch.rand(3) if draws else None
    stash = watch.stash()
    assert watch.has_drawn() == draws
    assert (stash is not None) == draws
    if stash is not None and drawn is not None:
        stash()
        assert torch.equal(torch.rand(3), drawn)


def test_meters_see_the_states_that_are_held_through_a_step_and_no_others() -> None:
    with mock.patch.object(torch, "get_rng_state", wraps=torch.get_rng_state) as seen:
        generators.of_device(CPU).now()
        watch = generators.DrawWatch([CPU])
        torch.rand(1)
        assert watch.has_drawn()
        assert seen.call_count == 0
        generators.of_device(CPU).now(is_seen=True)
        assert seen.call_count == 1
        stash = generators.stashed(CPU)
        assert seen.call_count == 2
        stash()
        assert seen.call_count == 3


def test_a_device_of_any_type_is_asked_for_its_generators() -> None:
    own = [torch.Generator(), torch.Generator().manual_seed(5)]
    device = SimpleNamespace(init=lambda: None, default_generators=own, current_device=lambda: 1)
    with mock.patch.object(torch, "get_device_module", return_value=device):
        assert [generators.default_of(torch.device("xpu", number)) for number in range(2)] == own
        assert generators.default_of(torch.device("xpu")) is own[1]
        sources = generators.of_devices([torch.device("xpu"), torch.device("xpu", 1), CPU])
        assert [each.name for each in sources] == ["cpu", "xpu:1"]
