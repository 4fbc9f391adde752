"""Which option each block takes: the cheapest choice within a budget, by a dynamic programme over blocks.

The state is the bytes that the blocks so far leave for backward. A choice fits where they, and the highest
total of forward and of backward of the next block, stay within the budget; so does what lies between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.budget.block_options import Option

_MOST_STATES = 1500


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One block of the programme.

    Fields:
        options: what it can do.
        forward_start, backward_start: bytes there at the beginning of its forward and backward without plan.
        between: highest total outside of blocks while this one, and those before it, wait for backward.
    """

    options: Sequence[Option]
    forward_start: int
    backward_start: int
    between: int


def cheapest(stages: Sequence[Stage], budget_bytes: int) -> list[int] | None:
    """Return the option of each block, by number; `None` where none that was found fits."""
    left, cost = np.zeros(1, dtype=np.int64), np.zeros(1)
    back: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    for stage in stages:
        added, highest, costs = _columns(stage)
        sums = left[:, None] + added[None, :]
        fits = (left[:, None] + highest[None, :] <= budget_bytes) & (sums + stage.between <= budget_bytes)
        before, option = np.nonzero(fits)
        if not len(before):
            return None
        left, cost = sums[before, option], cost[before] + costs[option]
        chosen = _frontier(left, cost)
        left, cost = left[chosen], cost[chosen]
        back.append((before[chosen], option[chosen]))
    state = int(np.argmin(cost))
    options: list[int] = []
    for before, option in reversed(back):
        options.append(int(option[state]))
        state = int(before[state])
    return options[::-1]


def smallest_budget(stages: Sequence[Stage]) -> int:
    """Return the smallest budget that some choice fits."""
    left, peak = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for stage in stages:
        added, highest, _ = _columns(stage)
        sums = left[:, None] + added[None, :]
        peaks = np.maximum(peak[:, None], np.maximum(left[:, None] + highest[None, :], sums + stage.between))
        left, peak = sums.ravel(), peaks.ravel()
        chosen = _frontier(left, peak)
        left, peak = left[chosen], peak[chosen]
    return int(peak.min())


def _columns(
    stage: Stage,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return what each option leaves, the highest total within the block, and its cost."""
    left = np.array([each.left_bytes for each in stage.options], dtype=np.int64)
    forward = np.array([each.forward_bytes for each in stage.options], dtype=np.int64) + stage.forward_start
    backward = np.array([each.backward_bytes for each in stage.options], dtype=np.int64)
    highest = np.maximum(forward, backward + stage.backward_start)
    return left, highest, np.array([each.cost for each in stage.options])


def _frontier(left: npt.NDArray[np.int64], cost: npt.NDArray[np.generic]) -> npt.NDArray[np.intp]:
    """Return the states that no other one beats; of many, some that are spread evenly."""
    order: npt.NDArray[np.intp] = np.lexsort((cost, left))
    costs = cost[order]
    best = np.minimum.accumulate(costs)
    is_better = np.concatenate([[True], costs[1:] < best[:-1]])
    chosen: npt.NDArray[np.intp] = order[is_better]
    if len(chosen) <= _MOST_STATES:
        return chosen
    spread = np.linspace(0, len(chosen) - 1, _MOST_STATES).astype(np.intp)
    return np.asarray(chosen[spread])
