"""Every generator a model may draw from is seeded, told apart and put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from harness.measure.rng import rng_states, seeded

CPU = torch.device("cpu")

DRAWS: dict[str, Callable[[], Any]] = {
    "cpu": lambda: torch.rand(()).item(),
    "python": random.random,
    "numpy": np.random.rand,
}


def drawn(draw: Callable[[], Any], *, seed: int = 0, step: int = 0, dp_rank: int = 0) -> Any:
    with seeded(seed, step=step, dp_rank=dp_rank, device=CPU):
        return draw()


@pytest.mark.parametrize("generator", DRAWS)
def test_a_step_draws_the_same_numbers_again_and_others_than_its_neighbours(generator: str) -> None:
    draw = DRAWS[generator]
    first = drawn(draw)
    assert drawn(draw) == first
    others = drawn(draw, seed=1), drawn(draw, step=1), drawn(draw, dp_rank=1)
    assert len({first, *others}) == 4


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("generator", DRAWS)
def test_afterwards_every_generator_goes_on_as_before(generator: str, fails: bool) -> None:
    def scope() -> None:
        with seeded(0, step=0, dp_rank=0, device=CPU):
            for draw in DRAWS.values():
                draw()
            if fails:
                raise ValueError("a step")

    before = rng_states(CPU)[generator]
    if fails:
        with pytest.raises(ValueError, match="a step"):
            scope()
    else:
        scope()
    assert torch.equal(rng_states(CPU)[generator], before)


@pytest.mark.parametrize("generator", DRAWS)
def test_a_draw_changes_the_state_of_its_generator_alone(generator: str) -> None:
    with seeded(0, step=0, dp_rank=0, device=CPU):
        before = rng_states(CPU)
        DRAWS[generator]()
        after = rng_states(CPU)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [generator]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        pytest.param("python", lambda: random.gauss(0.0, 1.0), id="Python"),
        pytest.param("numpy", np.random.randn, id="NumPy"),
    ],
)
def test_one_normal_number_is_told_from_two(generator: str, draw: Callable[[], Any]) -> None:
    states = []
    for count in (1, 2):
        with seeded(0, step=0, dp_rank=0, device=CPU):
            for _ in range(count):
                draw()
            states.append(rng_states(CPU)[generator])
    assert not torch.equal(*states)
