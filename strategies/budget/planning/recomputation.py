"""The least cost of what must run again after one moment of a step: the programme that both bounds solve.

At a moment some storages are there in every schedule; others are wanted later. A wanted storage is carried
through the moment (`there` = 1), or its maker runs again afterwards (`again` = 1), and then what the maker
reads is carried or made again, too. What is carried has bytes, and what runs again costs. Every schedule
gives each unknown 0 or 1, so the least cost with values between is a lower bound, and so is what branch and
bound has proven of the least cost with whole values.

Source: HiGHS (Huangfu and Hall, 2018) solves both programmes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from strategies.estimate.scipy_modules import scipy
from strategies.step.needed import needed

_NODES = 100
"""Most nodes of branch and bound: a number of seconds would give another bound each time."""

_MOST_WHOLE = 1200
"""Most unknowns of a programme with whole values: in larger ones they change nothing that one would see."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of every schedule of a kind.

    Fields:
        there: storages that are there then.
        wanted: storages that are needed afterwards.
        held_bytes: bytes of what is there then, with those of `there`.
    """

    there: frozenset[int]
    wanted: frozenset[int]
    held_bytes: int


class Recomputation:
    """The makers of a step's storages, and the least cost of running some of them again.

    Args:
        makers: the maker of each storage; what has none is there at all times.
    """

    def __init__(self, makers: Mapping[int, Maker], nbytes: Mapping[int, int]) -> None:
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
            costs[at] = self._least(moments[at], room_bytes) if most[at] else 0.0
            dearest = sorted(sorted(costs), key=costs.__getitem__, reverse=True)[:whole]
        highest = max(costs.values(), default=0.0)
        if not 0 < highest < np.inf:
            return highest
        for at in dearest:
            if self._most(moments[at], room_bytes, is_whole=True) > highest:
                highest = max(highest, self._least(moments[at], room_bytes, is_whole=True))
        return highest

    def _most(self, moment: Moment, room_bytes: int, *, is_whole: bool = False) -> float:
        """Return what the least cost at a moment is not above.

        All that costs anything is carried, but what costs least for its bytes, which runs again.

        Args:
            room_bytes, is_whole: as of `_least`.
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

    def _least(self, moment: Moment, room_bytes: int, *, is_whole: bool = False) -> float:
        """Return the least cost at a moment.

        Args:
            room_bytes: most bytes of what is there or carried.
            is_whole: whether a storage is carried or not, and a maker runs or not; else both may be in part.
                0 where the step is too large for that.
        """
        room = room_bytes - moment.held_bytes
        wanted = moment.wanted - moment.there
        if room < 0 or sum(self._nbytes[storage] for storage in wanted) <= room:
            return np.inf if room < 0 else 0.0
        storages = sorted(needed(wanted, lambda each: self._reads(each, moment)))
        column = {storage: index for index, storage in enumerate(storages)}
        makers = list(dict.fromkeys(self._makers[storage] for storage in storages))
        again = {maker: len(storages) + index for index, maker in enumerate(makers)}
        size = len(storages) + len(makers)
        if is_whole and size > _MOST_WHOLE:
            return 0.0
        # there + again >= 1 of what is wanted; >= again of its reader of what is read
        rows: list[tuple[tuple[int, float], ...]] = [
            ((column[storage], 1.0), (again[self._makers[storage]], 1.0)) for storage in wanted
        ]
        for maker in makers:
            for read in maker.reads & column.keys():
                run = again[self._makers[read]]
                rows.append(((column[read], 1.0), (run, 1.0), (again[maker], -1.0)))
        least = np.repeat([1.0, 0.0], [len(wanted), len(rows) - len(wanted)])
        # bytes are whole: rounding must not forbid what just fits
        unit_bytes = max(room, 1)
        rows.append(tuple((column[s], -self._nbytes[s] / unit_bytes) for s in storages))
        least = np.append(least, -(room + 0.5) / unit_bytes)
        costs = np.zeros(size)
        costs[len(storages) :] = [maker.cost for maker in makers]
        unit_cost = max(costs.max(initial=0.0), 1e-30)
        optimize = scipy("optimize")
        found = optimize.milp(
            costs / unit_cost,
            integrality=np.full(size, int(is_whole)),
            bounds=optimize.Bounds(0.0, 1.0),
            constraints=optimize.LinearConstraint(_matrix(rows, size), lb=least),
            options={"node_limit": _NODES},
        )
        if found.status == _INFEASIBLE:
            return np.inf
        proven = found.mip_dual_bound if is_whole else found.fun
        return float(max(0.0, proven or 0.0) * unit_cost * (1 - _MARGIN))

    def _reads(self, storage: int, moment: Moment) -> frozenset[int]:
        return (self._makers[storage].reads & self._makers.keys()) - moment.there


def _matrix(rows: Sequence[Sequence[tuple[int, float]]], size: int) -> Any:
    starts = np.cumsum([0, *map(len, rows)])
    columns = np.array([column for row in rows for column, _ in row])
    values = np.array([value for row in rows for _, value in row])
    return scipy("sparse").csr_array((values, columns, starts), shape=(len(rows), size))
