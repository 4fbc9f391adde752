"""Which option each block takes: the cheapest choice within a budget, by a dynamic programme over blocks.

The state is the bytes that the blocks so far leave for backward. A choice fits where they, and the highest
total of forward and of backward of the next block, stay within the budget; so does what lies between blocks.
Where bytes on the host are few, states with about as many of them compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.budget.block_options import Option

_MOST_STATES = 1500
_HOST_STEPS = 16


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


def cheapest(stages: Sequence[Stage], budget_bytes: int, host_bytes: int = 0) -> list[int] | None:
    """Return the option of each block, by number; `None` where none that was found fits.

    Args:
        stages: the blocks, in the order of forward.
        budget_bytes: most bytes on the device.
        host_bytes: most bytes on the host.
    """
    left, cost, host = np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros(1, dtype=np.int64)
    step = _step(stages, host_bytes)
    back: list[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]] = []
    for stage in stages:
        added, highest, costs, moved = _columns(stage)
        sums, on_host = left[:, None] + added[None, :], host[:, None] + moved[None, :]
        fits = (left[:, None] + highest[None, :] <= budget_bytes) & (sums + stage.between <= budget_bytes)
        before, option = np.nonzero(fits & (on_host <= host_bytes))
        if not len(before):
            return None
        left, cost, host = sums[before, option], cost[before] + costs[option], on_host[before, option]
        chosen = _frontier(left, cost, host // step)
        left, cost, host = left[chosen], cost[chosen], host[chosen]
        back.append((before[chosen], option[chosen]))
    state = int(np.argmin(cost))
    options: list[int] = []
    for before, option in reversed(back):
        options.append(int(option[state]))
        state = int(before[state])
    return options[::-1]


def smallest_budget(stages: Sequence[Stage], host_bytes: int = 0) -> int:
    """Return the smallest budget that some choice fits, with so many bytes on the host."""
    left, peak, host = (np.zeros(1, dtype=np.int64) for _ in range(3))
    step = _step(stages, host_bytes)
    for stage in stages:
        added, highest, _, moved = _columns(stage)
        sums, on_host = left[:, None] + added[None, :], host[:, None] + moved[None, :]
        peaks = np.maximum(peak[:, None], np.maximum(left[:, None] + highest[None, :], sums + stage.between))
        fits = on_host <= host_bytes
        left, peak, host = sums[fits], peaks[fits], on_host[fits]
        chosen = _frontier(left, peak, host // step)
        left, peak, host = left[chosen], peak[chosen], host[chosen]
    return int(peak.min())


def _step(stages: Sequence[Stage], host_bytes: int) -> int:
    """Return the bytes on the host within which states compete; all where no choice needs too many."""
    most = sum(max(option.host_bytes for option in stage.options) for stage in stages)
    return most + 1 if most <= host_bytes else host_bytes // _HOST_STEPS + 1


def _columns(
    stage: Stage,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return what each option leaves, the highest total within the block, its cost, and bytes on the host."""
    left = np.array([each.left_bytes for each in stage.options], dtype=np.int64)
    forward = np.array([each.forward_bytes for each in stage.options], dtype=np.int64) + stage.forward_start
    backward = np.array([each.backward_bytes for each in stage.options], dtype=np.int64)
    highest = np.maximum(forward, backward + stage.backward_start)
    host = np.array([each.host_bytes for each in stage.options], dtype=np.int64)
    return left, highest, np.array([each.cost for each in stage.options]), host


def _frontier(
    left: npt.NDArray[np.int64], cost: npt.NDArray[np.generic], group: npt.NDArray[np.int64]
) -> npt.NDArray[np.intp]:
    """Return the states of each group that no other one of it beats; of many, some that are spread evenly."""
    groups = np.unique(group)
    most = _MOST_STATES if len(groups) == 1 else 2 * _MOST_STATES // len(groups)
    return np.concatenate([_undominated(left, cost, np.flatnonzero(group == each), most) for each in groups])


def _undominated(
    left: npt.NDArray[np.int64], cost: npt.NDArray[np.generic], among: npt.NDArray[np.intp], most: int
) -> npt.NDArray[np.intp]:
    order: npt.NDArray[np.intp] = among[np.lexsort((cost[among], left[among]))]
    costs = cost[order]
    best = np.minimum.accumulate(costs)
    is_better = np.concatenate([[True], costs[1:] < best[:-1]])
    chosen: npt.NDArray[np.intp] = order[is_better]
    if len(chosen) <= most:
        return chosen
    spread = np.linspace(0, len(chosen) - 1, most).astype(np.intp)
    return np.asarray(chosen[spread])
