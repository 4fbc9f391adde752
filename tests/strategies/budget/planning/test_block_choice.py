"""The programme over blocks: of many equal ones it finds the mixture of options that a convex hull tells."""

from __future__ import annotations

import random

import numpy as np
import pytest

from strategies.budget.planning.block_choice import Stage, cheapest, smallest_budget
from strategies.budget.planning.block_options import Option
from strategies.budget.planning.simulation import PLAIN, Effect, Work

BEST = ((3 << 20, 0.0), (2 << 20, 1.0), (1 << 20, 4.0), (1 << 18, 8.0))
"""Bytes that an option leaves, and its cost: the corners of the hull."""


def option(left_bytes: int, cost: float, host_bytes: int = 0) -> Option:
    return Option(
        decision=PLAIN,
        forward_bytes=0,
        left_bytes=left_bytes,
        backward_bytes=left_bytes,
        host_bytes=host_bytes,
        cost=cost,
        work=Work(0, 0.0),
        units=0,
        follow=Effect,
    )


def options(seed: int) -> list[Option]:
    """Return the best options among many that are a little worse, or cost less by next to nothing."""
    chance = random.Random(seed)
    lefts, costs = map(list, zip(*reversed(BEST), strict=True))
    found = [option(*each) for each in BEST]
    for _ in range(60):
        left = chance.randint(lefts[0], lefts[-1])
        found.append(option(left, float(np.interp(left, lefts, costs)) * 1.2 + chance.uniform(0.1, 0.5)))
        left = chance.randint(lefts[-1], 3 * lefts[-1])
        found.append(option(left, -1e-9 * left / lefts[-1] * chance.uniform(0.9, 1)))
    return found


@pytest.mark.parametrize("blocks", [8, 64, 160])
@pytest.mark.parametrize("share", [0.99, 0.8, 0.5, 0.2])
def test_many_equal_blocks_cost_what_the_hull_says(blocks: int, share: float) -> None:
    left_bytes = int(share * BEST[0][0])
    stage = Stage(options=options(blocks), forward_start=0, backward_start=0, between=0)
    choices = cheapest([stage] * blocks, blocks * left_bytes)
    assert choices is not None
    lefts, costs = zip(*reversed(BEST), strict=True)
    bound = blocks * float(np.interp(left_bytes, lefts, costs))
    cost = sum(stage.options[each.option].cost for each in choices)
    assert bound - 1e-6 <= cost <= bound + max(-np.diff(costs))


@pytest.mark.parametrize(("host_bytes", "smallest"), [(300, 30), (310, 21), (3100, 3)])
def test_what_competes_leaves_room_on_the_host_for_later_blocks(host_bytes: int, smallest: int) -> None:
    # of about as many bytes on the host the state with more has fewer on the device
    stage = Stage(
        options=[option(10, 0.0, 100), option(1, 0.0, 110)], forward_start=0, backward_start=0, between=0
    )
    assert smallest_budget([stage] * 3, host_bytes) == smallest
    choices = cheapest([stage] * 3, smallest, host_bytes)
    assert choices is not None
    assert sum(stage.options[each.option].host_bytes for each in choices) <= host_bytes
