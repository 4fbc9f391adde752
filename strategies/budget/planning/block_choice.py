"""The option that each block takes: the cheapest choice within a budget, by a dynamic programme over blocks.

The state is the bytes that the blocks so far leave for backward. A choice fits where they, and the highest
total of forward and of backward of the next block, stay within the budget; so does what lies between blocks.
Where bytes on the host are few, states with about as many of them compete. A chain or a group of blocks is
one step of the programme, from the blocks before it to those behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_options import Option
from strategies.budget.planning.group_options import GroupOption

_MOST_STATES = 1000
_CORNERS = 96
_HULL_ROUNDS = 2
"""States that the search for the convex hull begins with, and its rounds."""

_HOST_STEPS = 16
_PLACES = 4096
"""Intervals of bytes in which states are compared before they are sorted."""

Bytes: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = tuple[Bytes, Bytes, npt.NDArray[np.float64], Bytes]
"""What each option leaves, the highest total while its blocks run, its cost, and bytes on the host."""


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
    between: int = 0

    def columns(self, known: dict[int, _Rows] | None = None) -> Columns:
        """Return what the programme knows of the options.

        Args:
            known: what lists of options say, by their identity, for equal blocks share one; it is added to.
        """
        known = {} if known is None else known
        if id(self.options) not in known:
            known[id(self.options)] = _rows_of(self.options)
        (left, forward, backward, host), cost = known[id(self.options)]
        return left, np.maximum(forward + self.forward_start, backward + self.backward_start), cost, host


_Rows: TypeAlias = tuple[Bytes, npt.NDArray[np.float64]]


def _rows_of(options: Sequence[Option]) -> _Rows:
    """Return the bytes of options, a row of each kind, and their costs."""
    rows = [(each.left_bytes, each.forward_bytes, each.backward_bytes, each.host_bytes) for each in options]
    return np.array(rows, dtype=np.int64).T.copy(), np.array([each.cost for each in options])


@dataclass(frozen=True, kw_only=True, slots=True)
class Chained:
    """Consecutive blocks that can be one chain.

    Fields:
        start, end: numbers of the first block and of the one behind the last.
        stage: the chain as a block of its own.
    """

    start: int
    end: int
    stage: Stage

    def columns(self, known: dict[int, _Rows] | None = None) -> Columns:
        """Return what the programme knows of the options, as a stage does."""
        return self.stage.columns(known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Consecutive blocks that can be one group.

    Fields:
        start, end: numbers of the first block and of the one behind the last.
        options: what it can do.
    """

    start: int
    end: int
    options: Sequence[GroupOption]

    def columns(self, _known: dict[int, _Rows] | None = None) -> Columns:
        """Return what the programme knows of the options."""
        columns = [(each.left_bytes, each.highest_bytes) for each in self.options]
        left, highest = np.array(columns, dtype=np.int64).T
        return left, highest, np.array([each.cost for each in self.options]), np.zeros_like(left)


Span: TypeAlias = Group | Chained
"""Consecutive blocks that are decided about together."""


class Choice(NamedTuple):
    """The decision about one block, or one span.

    Fields:
        start, end: numbers of the first block and of the one behind the last.
        span: number of the span; `None` of a block that is in none.
        option: number of the option of the block or of the span.
    """

    start: int
    end: int
    span: int | None
    option: int


def cheapest(
    stages: Sequence[Stage], budget_bytes: int, host_bytes: int = 0, spans: Sequence[Span] = ()
) -> list[Choice] | None:
    """Return the choice for all blocks, in the order of forward; `None` where none that was found fits.

    Args:
        stages: the blocks, in the order of forward.
        budget_bytes: most bytes on the device.
        host_bytes: most bytes on the host.
        spans: blocks that can be decided about together.
    """
    step = _step(stages, host_bytes)
    reached = [_States.at_start()]
    every = _moves(stages, spans)
    for stage, moves, room in zip(stages, every, _rooms(every, host_bytes), strict=True):
        found = []
        for move in moves:
            states = reached[move.start]
            fits = states.left[:, None] <= (budget_bytes - move.beyond(stage))[None, :]
            if states.host.any() or move.host.any():
                fits &= states.host[:, None] + move.host[None, :] <= room
            found.append(states.moved(move, fits, states.goal[:, None] + move.cost[None, :]))
        reached.append(_States.best_of(found, step))
    return _followed_back(reached) if len(reached[-1].left) else None


def smallest_budget(stages: Sequence[Stage], host_bytes: int = 0, spans: Sequence[Span] = ()) -> int:
    """Return the smallest budget that some choice fits, with so many bytes on the host."""
    step = _step(stages, host_bytes)
    reached = [_States.at_start()]
    every = _moves(stages, spans)
    for stage, moves, room in zip(stages, every, _rooms(every, host_bytes), strict=True):
        found = []
        for move in moves:
            states = reached[move.start]
            on_host = states.host[:, None] + move.host[None, :]
            peaks = np.maximum(states.goal[:, None], states.left[:, None] + move.beyond(stage)[None, :])
            found.append(states.moved(move, on_host <= room, peaks))
        reached.append(_States.best_of(found, step))
    return int(reached[-1].goal.min())


class _Move(NamedTuple):
    """A block or a span that ends at one place: its options as columns."""

    start: int
    span: int | None
    left: Bytes
    highest: Bytes
    cost: npt.NDArray[np.float64]
    host: Bytes

    def beyond(self, stage: Stage) -> Bytes:
        """Return the highest total of each option beyond what is left before the move.

        Args:
            stage: the block that it ends with.
        """
        return np.maximum(self.highest, self.left + stage.between)


@dataclass(frozen=True, kw_only=True, slots=True)
class _States:
    """The states after some blocks, of which none beats another.

    Fields:
        left: bytes that wait for backward.
        goal: what is made least: the cost, or the peak.
        host: bytes on the host.
        moves: moves that lead here.
        move, before, option: move, state before and option of each state.
    """

    left: Bytes
    goal: npt.NDArray[Any]
    host: Bytes
    moves: Sequence[_Move]
    move: npt.NDArray[np.intp]
    before: npt.NDArray[np.intp]
    option: npt.NDArray[np.intp]

    @classmethod
    def at_start(cls) -> _States:
        """Return the state before the first block."""
        none, number = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.intp)
        return cls(
            left=none, goal=np.zeros(1), host=none, moves=(), move=number, before=number, option=number
        )

    def moved(self, move: _Move, fits: npt.NDArray[np.bool_], goal: npt.NDArray[Any]) -> _States:
        """Return the states after one move.

        Args:
            move: the move.
            fits: which states may take which option, shape (states, options).
            goal: what is made least, of the same shape.
        """
        before, option = np.nonzero(fits)
        return _States(
            left=self.left[before] + move.left[option],
            goal=goal[before, option],
            host=self.host[before] + move.host[option],
            moves=(move,),
            move=np.zeros(len(before), dtype=np.intp),
            before=before,
            option=option,
        )

    @classmethod
    def best_of(cls, found: Sequence[_States], step: int) -> _States:
        """Return the states that no other one beats."""
        left, goal, host, before, option = (
            np.concatenate([getattr(each, name) for each in found])
            for name in ("left", "goal", "host", "before", "option")
        )
        move = np.repeat(np.arange(len(found)), [len(each.left) for each in found])
        chosen = _frontier(left, goal, host // step)
        return cls(
            left=left[chosen],
            goal=goal[chosen],
            host=host[chosen],
            moves=[each.moves[0] for each in found],
            move=move[chosen],
            before=before[chosen],
            option=option[chosen],
        )


def _followed_back(reached: Sequence[_States]) -> list[Choice]:
    """Return the choices that lead to the last state of the least cost."""
    place, state = len(reached) - 1, int(np.argmin(reached[-1].goal))
    found: list[Choice] = []
    while place:
        states = reached[place]
        move = states.moves[int(states.move[state])]
        found.append(Choice(move.start, place, move.span, int(states.option[state])))
        place, state = move.start, int(states.before[state])
    return found[::-1]


def _moves(stages: Sequence[Stage], spans: Sequence[Span]) -> list[list[_Move]]:
    """Return for each block the moves that end with it: of itself, and of spans."""
    known = dict[int, _Rows]()
    moves = [[_Move(number, None, *stage.columns(known))] for number, stage in enumerate(stages)]
    for number, span in enumerate(spans):
        moves[span.end - 1].append(_Move(span.start, number, *span.columns(known)))
    return moves


def _rooms(moves: Sequence[Sequence[_Move]], host_bytes: int) -> list[int]:
    """Return the most bytes on the host behind each block, which leave room for the fewest of later ones."""
    rooms = [-1] * len(moves) + [host_bytes]
    for end, of_end in reversed(list(enumerate(moves, 1))):
        for move in of_end:
            rooms[move.start] = max(rooms[move.start], rooms[end] - int(move.host.min()))
    return rooms[1:]


def _step(stages: Sequence[Stage], host_bytes: int) -> int:
    """Return the bytes on the host within which states compete; all where no choice needs too many."""
    most = sum(max(option.host_bytes for option in stage.options) for stage in stages)
    return most + 1 if most <= host_bytes else host_bytes // _HOST_STEPS + 1


def _frontier(left: Bytes, cost: npt.NDArray[np.generic], group: Bytes) -> npt.NDArray[np.intp]:
    """Return the states of each group that no other one of it beats; of many, some that are spread evenly."""
    if not len(left):
        return np.zeros(0, dtype=np.intp)
    groups = np.unique(group) if group.any() else group[:1]
    most = _MOST_STATES if len(groups) == 1 else 2 * _MOST_STATES // len(groups)
    return np.concatenate([_undominated(left, cost, np.flatnonzero(group == each), most) for each in groups])


def _undominated(
    left: Bytes, cost: npt.NDArray[np.generic], among: npt.NDArray[np.intp], most: int
) -> npt.NDArray[np.intp]:
    among = _promising(left, cost, among)
    order: npt.NDArray[np.intp] = among[np.lexsort((cost[among], left[among]))]
    costs = cost[order]
    best = np.minimum.accumulate(costs)
    is_better = np.concatenate([[True], costs[1:] < best[:-1]])
    chosen: npt.NDArray[np.intp] = order[is_better]
    if len(chosen) <= most:
        return chosen
    return chosen[_some(left[chosen].astype(np.float64), cost[chosen].astype(np.float64), most)]


def _some(left: npt.NDArray[np.float64], cost: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.intp]:
    """Return the numbers of some of many states that come with more bytes and less cost.

    Half of them are spread evenly. Those alone would lose a little with each block, and more the more blocks
    there are. The other half are the nearest to the convex hull: the best choice for many equal blocks mixes
    two options, and stays there.
    """
    spread = np.linspace(0, len(left) - 1, most - most // 2).astype(np.intp)
    corners = np.linspace(0, len(left) - 1, _CORNERS).astype(np.intp)
    for _ in range(_HULL_ROUNDS):
        corners = corners[_hull(left[corners], cost[corners])]
        prices = -np.diff(cost[corners]) / np.diff(left[corners])  # of a byte, along each edge
        totals = cost[None, :] + prices[:, None] * left[None, :]
        corners = np.unique(np.concatenate([corners, totals.argmin(axis=1)]))
    each = max(most // 2 // len(totals), 1)
    near = np.argpartition(totals, each, axis=1)[:, :each]
    return np.unique(np.concatenate([spread, corners, near.ravel()]))


def _hull(left: npt.NDArray[np.float64], cost: npt.NDArray[np.float64]) -> list[int]:
    """Return the numbers of the points on the lower convex hull, of points in the order of `left`."""
    found: list[int] = []
    for number in range(len(left)):
        while len(found) > 1:
            a, b = found[-2:]
            turn = (left[b] - left[a]) * (cost[number] - cost[a])
            if turn > (cost[b] - cost[a]) * (left[number] - left[a]):
                break
            found.pop()
        found.append(number)
    return found


def _promising(
    left: Bytes, cost: npt.NDArray[np.generic], among: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Return the states without most of those that another one beats, which need not be sorted then."""
    lefts, costs = left[among], cost[among]
    least, most = int(lefts.min()), int(lefts.max())
    place = (lefts - least) // ((most - least) // _PLACES + 1)
    cheapest = np.full(_PLACES + 1, costs.max())
    np.minimum.at(cheapest, place, costs)
    below = np.minimum.accumulate(cheapest)  # the cheapest so far; of a place and all with fewer bytes
    is_beaten = (place > 0) & (costs >= below[place - 1])
    return among[~is_beaten]
