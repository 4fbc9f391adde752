"""Prices of bytes in the choice over blocks, by which decisions are sought that it lacks.

The choice is relaxed: a block takes options in part. The duals of the relaxed programme say what a byte more
would spare, at each of the moments that hold the budget. So a decision that is not among the options helps if
its cost, and its bytes at these prices, are less than those of the options that are taken.

Source: column generation, Gilmore and Gomory (1961).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_choice import Columns, Stage
from strategies.estimate.scipy_modules import scipy

_MOST_COLUMNS = 100
"""Options of a block that the programme is given, spread evenly over all costs."""

_EXCESS = 1e3
"""Cost of a budget of bytes above the budget, in that of the dearest option."""


class Price(NamedTuple):
    """The price of a byte in one block.

    Fields:
        left: price of what waits for backward.
        highest: price at the highest moment of the block.
    """

    left: float
    highest: float


class Room(NamedTuple):
    """The bytes that the other blocks leave to one, as they are decided about.

    Fields:
        left: most bytes that may wait for backward.
        highest: most bytes at the highest moment of the block.
    """

    left: float
    highest: float


class Worth(NamedTuple):
    """The measure that a search makes least of a block, or of several as one: cost, and bytes at prices.

    Fields:
        price: price of each byte.
        room: bytes that there are.
        beyond: price of each byte beyond these.
        stage: the block, or several as one.
    """

    price: Price
    room: Room
    beyond: float
    stage: Stage

    def of(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return what options cost, their bytes included.

        Args:
            rows: cost, what is left, and the highest totals of backward and forward, a row each.
        """
        cost, left, backward, forward = rows.T
        highest = np.maximum(forward + self.stage.forward_start, backward + self.stage.backward_start)
        beyond = np.maximum(0.0, left - self.room.left) + np.maximum(0.0, highest - self.room.highest)
        found: npt.NDArray[np.float64] = cost + self.price.left * left + self.price.highest * highest
        found += self.beyond * beyond
        return found


class Waiting(NamedTuple):
    """The bytes of some blocks and spans in a row, in the order of forward.

    Fields:
        left, highest: what each leaves for backward, and its highest total.
        between: highest total outside of blocks while each of them, and those before it, wait for backward.
        budget_bytes: most bytes.
    """

    left: npt.NDArray[np.int64]
    highest: npt.NDArray[np.int64]
    between: npt.NDArray[np.int64]
    budget_bytes: int

    def room(self, first: int, last: int) -> Room:
        """Return the room of one of them, or of several as one."""
        others = self.left.copy()
        others[first : last + 1] = 0
        total = np.cumsum(others)
        waits = self.budget_bytes - self.between[last:] - total[last:]
        runs = self.budget_bytes - self.highest[last + 1 :] - total[last:-1]
        return Room(
            left=float(np.concatenate([waits, runs]).min()),
            highest=float(self.budget_bytes - total[first]),
        )


def price_of(priced: Sequence[Price], first: int, last: int) -> Price:
    """Return the price of a byte in one of some blocks, or in several as one.

    These wait as the last does, and are as high as all of them at once.
    """
    left = priced[last].left
    return Price(left, priced[first].left + priced[first].highest - left)


def prices(parts: Sequence[Columns], between: Sequence[int], budget_bytes: int) -> list[Price]:
    """Return the prices in each of some blocks and spans, in the order of forward.

    Args:
        parts: what the programme over blocks knows of their options.
        between: highest total outside of blocks while each of them, and those before it, wait for backward.
        budget_bytes: most bytes.
    """
    some = [_some(columns) for columns in parts]
    left, highest, cost = (np.concatenate([each[number] for each in some]) for number in range(3))
    number = np.repeat(np.arange(len(parts)), [len(each[2]) for each in some])
    here = np.arange(len(parts))[:, None]
    running = np.where(number < here, left, 0) + np.where(number == here, highest, 0)
    waiting = np.where(number <= here, left, 0)
    room = np.append(np.full(len(parts), budget_bytes), budget_bytes - np.array(between)) / budget_bytes
    bytes_of = np.vstack([running, waiting]) / budget_bytes
    unit_cost = max(float(cost.max()), 1e-30)
    found = scipy("optimize").linprog(
        np.append(cost / unit_cost, _EXCESS),
        A_ub=np.column_stack([bytes_of, np.full(len(bytes_of), -1.0)]),
        b_ub=room,
        A_eq=np.column_stack([number == here, np.zeros(len(parts))]),
        b_eq=np.ones(len(parts)),
    )
    if found.status:  # the solver has failed: a programme with excess has a solution
        return [Price(0.0, 0.0)] * len(parts)
    worth = -found.ineqlin.marginals * unit_cost / budget_bytes
    at_run, at_wait = np.split(worth, 2)
    return [
        Price(float(at_run[each + 1 :].sum() + at_wait[each:].sum()), float(at_run[each]))
        for each in range(len(parts))
    ]


def _some(columns: Columns) -> list[npt.NDArray[Any]]:
    """Return what some options leave, their highest totals and their costs."""
    left, highest, cost, _ = columns
    order = np.argsort(cost, kind="stable")
    places = np.linspace(0, len(order) - 1, min(len(order), _MOST_COLUMNS)).astype(np.intp)
    return [each[order[places]] for each in (left, highest, cost)]
