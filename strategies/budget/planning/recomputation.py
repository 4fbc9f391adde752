"""The least cost of what must run again after one moment of a step: the programme that both bounds solve.

At a moment some storages are there in every schedule; others are wanted later. A wanted storage is carried
through the moment (`there` = 1), or its maker runs again afterwards (`again` = 1), and then what the maker
reads is carried or made again, too. What is carried has bytes, and what runs again costs. Every schedule
gives each unknown 0 or 1, so the least cost with values between is a lower bound, and so is what branch and
bound has proven of the least cost with whole values.

Source: HiGHS (Huangfu and Hall, 2018) solves both programmes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strategies.estimate.scipy_modules import scipy
from strategies.step.needed import needed

_NODES, _NODES_OF_UNKNOWNS = 100, 20_000
"""Most nodes of branch and bound, and their product with unknowns: a number of seconds would give another
bound each time."""

_MOST_WHOLE, _MOST_WHOLE_TOGETHER = 1200, 1100
"""Most unknowns of a programme with whole values, at one moment and at several.

At one moment of larger ones they change nothing that one would see; at several moments they take seconds."""

_MARGIN = 1e-7
"""Share by which a bound is lowered, because the solver computes with floating point numbers."""

_INFEASIBLE = 2


class LeastFlops(NamedTuple):
    """Bounds of what runs again within a budget; endless where no schedule keeps it.

    Fields:
        of_any: FLOPs of any schedule of the step's operators.
        of_autograd: FLOPs of those that leave backward to autograd, or to the order of compiled graphs.
    """

    of_any: float
    of_autograd: float

    def in_plan(self) -> dict[str, Any]:
        """Return the fields of a plan, 0 where no schedule was found."""
        return {
            "lower_bound_extra_flops": _finite(self.of_any),
            "lower_bound_autograd_flops": _finite(self.of_autograd),
        }


def _finite(flops: float) -> int:
    return int(flops) if math.isfinite(flops) else 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Maker:
    """One operator that makes storages again, or several that run together.

    Fields:
        reads: storages that it reads, and that the step has made before.
    """

    reads: frozenset[int]
    cost: float


OUTSIDE = Maker(reads=frozenset(), cost=math.inf)
"""What makes a storage that nothing makes again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of every schedule of a kind.

    Fields:
        there: storages that are there then.
        wanted: storages that are needed afterwards.
        held_bytes: bytes of what is there then, with those of `there`.
        at: its number, where several are looked at together.
        soon: those of `wanted` that are needed before the next of them.
    """

    there: frozenset[int]
    wanted: frozenset[int]
    held_bytes: int
    at: int = 0
    soon: frozenset[int] = frozenset()


class Recomputation:
    """The makers of a step's storages, and the least cost of running some of them again.

    Args:
        makers: the maker of each storage; what has none is there at all times.

    Attributes:
        unknowns: how many all programmes had that were solved.
    """

    def __init__(self, makers: Mapping[int, Maker], nbytes: Mapping[int, int]) -> None:
        self.unknowns = 0
        self._makers = makers
        self._nbytes = nbytes

    def highest(self, moments: Sequence[Moment], room_bytes: int, whole: int = 1) -> float:
        """Return the highest of the least costs at some moments; endless where one has no solution.

        Args:
            room_bytes: most bytes of what is there or carried.
            whole: number of moments, those of the highest costs, at which whole values are sought, too.
        """
        if any(moment.held_bytes > room_bytes for moment in moments):
            return np.inf
        most = [self._most(moment, room_bytes) for moment in moments]
        costs: dict[int, float] = {}
        dearest: list[int] = []
        for at in sorted(range(len(moments)), key=most.__getitem__, reverse=True):
            if len(dearest) == whole and most[at] < costs[dearest[-1]]:
                break  # none of the others costs as much
            costs[at] = self.least([moments[at]], room_bytes) if most[at] else 0.0
            dearest = sorted(sorted(costs), key=costs.__getitem__, reverse=True)[:whole]
        highest = max(costs.values(), default=0.0)
        if not 0 < highest < np.inf:
            return highest
        for at in dearest:
            if self._most(moments[at], room_bytes, is_whole=True) > highest:
                highest = max(highest, self.least([moments[at]], room_bytes, is_whole=True))
        return highest

    def _most(self, moment: Moment, room_bytes: int, *, is_whole: bool = False) -> float:
        """Return what the least cost at a moment is not above.

        All that costs anything is carried, but what costs least for its bytes, which runs again.

        Args:
            room_bytes, is_whole: as of `least`.
        """
        made: Counter[Maker] = Counter()
        for storage in needed(moment.wanted - moment.there, lambda each: self._reads(each, moment)):
            made[self._makers[storage]] += self._nbytes[storage]
        carried = {maker: size for maker, size in made.items() if maker.cost and size}
        over, cost = sum(carried.values()) + moment.held_bytes - room_bytes, 0.0
        for maker in sorted(carried, key=lambda each: each.cost / carried[each]):
            if over <= 0:
                break
            cost += maker.cost * (1.0 if is_whole else min(1.0, over / carried[maker]))
            over -= carried[maker]
        return cost * (1 - _MARGIN)

    def least(self, moments: Sequence[Moment], room_bytes: int, *, is_whole: bool = False) -> float:
        """Return the least cost of what runs again after the first of some moments.

        Args:
            moments: moments of the same schedules, in order of time.
            room_bytes: most bytes of what is there or carried.
            is_whole: whether a storage is carried or not, and a maker runs or not; else both may be in part.
                0 where the step is too large for that.
        """
        rooms = [room_bytes - moment.held_bytes for moment in moments]
        lacking = [moment.wanted - moment.there for moment in moments]
        if min(rooms) < 0:
            return np.inf
        if all(self._bytes_of(each) <= room for each, room in zip(lacking, rooms, strict=True)):
            return 0.0
        programme = _Programme()
        windows = [self._window(programme, moment, moment is moments[-1]) for moment in moments]
        if is_whole and len(programme.costs) > (_MOST_WHOLE if len(moments) == 1 else _MOST_WHOLE_TOGETHER):
            return 0.0
        self.unknowns += len(programme.costs)
        for moment, window, each, room in zip(moments, windows, lacking, rooms, strict=True):
            self._cover(programme, window.there, window.later, each)
            # bytes are whole: rounding must not forbid what just fits
            unit_bytes = max(room, 1)
            sizes = [(column, -self._nbytes[each] / unit_bytes) for each, column in window.there.items()]
            programme.at_least(-(room + 0.5) / unit_bytes, *sizes)
            if moment is not moments[-1]:
                self._cover(programme, window.there, window.again, moment.soon - moment.there)
        for now, then in pairwise(windows):
            self._follow(programme, now, then)
        return programme.least(is_whole=is_whole)

    def _bytes_of(self, storages: Iterable[int]) -> int:
        return sum(self._nbytes[storage] for storage in storages)

    def _window(self, programme: _Programme, moment: Moment, is_last: bool) -> _Window:
        """Enter the unknowns of what is carried through a moment, and of what runs again after it."""
        storages = sorted(needed(moment.wanted - moment.there, lambda each: self._reads(each, moment)))
        there = {storage: programme.unknown() for storage in storages}
        makers = dict.fromkeys(self._makers[storage] for storage in storages)
        again = {maker: programme.unknown(maker.cost) for maker in makers if maker is not OUTSIDE}
        return _Window(there, again, again if is_last else {maker: programme.unknown() for maker in again})

    def _cover(
        self,
        programme: _Programme,
        there: Mapping[int, int],
        runs: Mapping[Maker, int],
        wanted: Iterable[int],
    ) -> None:
        """Enter that what is wanted, and what its makers read, is there or made."""
        for storage in wanted:
            programme.at_least(1.0, (there[storage], 1.0), *self._made(storage, runs))
        for maker in runs:
            for read in maker.reads & there.keys():
                made = self._made(read, runs)
                programme.at_least(0.0, (there[read], 1.0), *made, (runs[maker], -1.0))

    def _made(self, storage: int, runs: Mapping[Maker, int]) -> Iterator[tuple[int, float]]:
        """Yield the unknown of what makes a storage, if anything does."""
        if self._makers[storage] is not OUTSIDE:
            yield runs[self._makers[storage]], 1.0

    def _follow(self, programme: _Programme, now: _Window, then: _Window) -> None:
        """Enter that what runs now or later runs in a window, and what is carried on was there or made."""
        for maker, later in now.later.items():
            after = [(then.later[maker], 1.0)] if maker in then.later else []
            programme.at_least(0.0, (now.again[maker], 1.0), *after, (later, -1.0))
        for storage in now.there.keys() & then.there.keys():
            made = self._made(storage, now.again)
            programme.at_least(0.0, (now.there[storage], 1.0), *made, (then.there[storage], -1.0))

    def _reads(self, storage: int, moment: Moment) -> frozenset[int]:
        return (self._makers[storage].reads & self._makers.keys()) - moment.there


class _Window(NamedTuple):
    """The unknowns of a moment, and of the time until the next one.

    Fields:
        there: unknown of each storage, that it is carried through the moment.
        again: unknown of each maker, that it runs in that time.
        later: unknown of each maker, that it runs in that time or after it.
    """

    there: dict[int, int]
    again: dict[Maker, int]
    later: dict[Maker, int]


class _Programme:
    """A linear programme over unknowns from 0 to 1.

    Attributes:
        costs: cost of each unknown.
    """

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._rows: list[tuple[tuple[int, float], ...]] = []
        self._least: list[float] = []

    def unknown(self, cost: float = 0.0) -> int:
        """Return the number of a new unknown."""
        self.costs.append(cost)
        return len(self.costs) - 1

    def at_least(self, least: float, *terms: tuple[int, float]) -> None:
        """Enter that a sum of unknowns, each with its factor, is at least so much."""
        self._rows.append(terms)
        self._least.append(least)

    def least(self, *, is_whole: bool) -> float:
        """Return a lower bound of the least cost; endless where there is no solution."""
        costs, least = np.array(self.costs), np.array(self._least)
        matrix = _matrix(self._rows, len(costs))
        arrays = (costs, least, matrix.indptr, matrix.indices, matrix.data)
        said = hashlib.sha256(f"{is_whole} {[each.dtype for each in arrays]} {len(least)}".encode())
        for each in arrays:
            said.update(each.tobytes())
        if said.digest() not in _SOLVED:
            _SOLVED[said.digest()] = _least(costs, least, matrix, is_whole)
        return _SOLVED[said.digest()]


_SOLVED: dict[bytes, float] = {}
"""The least cost of each programme of this process, by its digest: half of all programmes come again."""


def _least(costs: npt.NDArray[Any], least: npt.NDArray[Any], matrix: Any, is_whole: bool) -> float:
    unit_cost = max(costs.max(initial=0.0), 1e-30)
    optimize = scipy("optimize")
    found = optimize.milp(
        costs / unit_cost,
        integrality=np.full(len(costs), int(is_whole)),
        bounds=optimize.Bounds(0.0, 1.0),
        constraints=optimize.LinearConstraint(matrix, lb=least),
        options={"node_limit": min(_NODES, _NODES_OF_UNKNOWNS // max(len(costs), 1))},
    )
    if found.status == _INFEASIBLE:
        return np.inf
    proven = found.mip_dual_bound if is_whole else found.fun
    return float(max(0.0, proven or 0.0) * unit_cost * (1 - _MARGIN))


def _matrix(rows: Sequence[Sequence[tuple[int, float]]], size: int) -> Any:
    starts = np.cumsum([0, *map(len, rows)])
    columns = np.array([column for row in rows for column, _ in row])
    values = np.array([value for row in rows for _, value in row])
    return scipy("sparse").csr_array((values, columns, starts), shape=(len(rows), size))
