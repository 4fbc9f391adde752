"""The groups that are worth considering: which blocks may be in one, and what each keeps within it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from strategies.budget.planning.block_options import CallOptions, Option
from strategies.budget.planning.group_simulation import Member, first_ask, shares_of
from strategies.budget.planning.simulation import Work
from strategies.step.step_graph import StepGraph

_LENGTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
_MOST_KEEPS = 16
_MOST_STATES = 64
_TOTALS = 12

Bytes: TypeAlias = npt.NDArray[np.int64]
_COLUMNS = ("forward", "left", "peak", "second", "backward")
_Row: TypeAlias = tuple[frozenset[int], int, int, int, int, int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOption:
    """The values that the blocks of a group keep, and what follows, in bytes beyond what those before left.

    Fields:
        keeps: what each block keeps from the second forward on.
        highest_bytes: highest total of the step while forward and backward of its blocks run.
        left_bytes: bytes that wait for backward.
        cost: cost of what runs again.
        total: highest total of its backward, beyond what is there when the second forward begins.
    """

    keeps: tuple[frozenset[int], ...]
    highest_bytes: int
    left_bytes: int
    cost: float
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choices:
    """The values that one member can keep, a row each; bytes beyond those at the beginning of its windows.

    Fields:
        forward: highest total of its forward.
        left: bytes that wait for backward.
        peak: most bytes of its second forward.
        second: bytes that are there after its second forward.
        backward: highest total of its backward, without what members before it have there.
        cost: cost of what runs again.
    """

    keeps: list[frozenset[int]]
    forward: Bytes
    left: Bytes
    peak: Bytes
    second: Bytes
    backward: Bytes
    cost: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> _Choices:
        """Return the choices of some rows."""
        keeps, *columns, cost = zip(*rows, strict=True)
        return cls(
            keeps=list(keeps),
            **dict(zip(_COLUMNS, (np.array(each, dtype=np.int64) for each in columns), strict=True)),
            cost=np.array(cost, dtype=np.float64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """The values that the members of a group keep, wherever in the step it is.

    Fields:
        highest: highest total of its backward, beyond what is there when the second forward begins.
        forward, left: highest total of each member's forward, and its bytes that wait for backward.
        cost: cost of what runs again.
    """

    keeps: tuple[frozenset[int], ...]
    highest: int
    forward: tuple[int, ...]
    left: tuple[int, ...]
    cost: float


class Groups:
    """The groups of a step.

    Args:
        options: the options of each call outside of groups.
        random_state_bytes: bytes on the device of the state of a random operator.
    """

    def __init__(
        self,
        graph: StepGraph,
        callers: Sequence[CallOptions],
        options: Sequence[Sequence[Option]],
        cost: Callable[[Work], float],
        *,
        random_state_bytes: int,
    ) -> None:
        self._graph, self._callers, self._options, self._cost = graph, callers, options, cost
        self._random_state_bytes = random_state_bytes
        self._makers = {s: index for index, caller in enumerate(callers) for s in caller.call.storages}
        self._writers: dict[int, set[int]] = {}
        for operator in graph.operators:
            for storage in operator.writes:
                self._writers.setdefault(storage, set()).add(operator.call)
        self._may_join = [False, *(self._follows(index) for index in range(1, len(callers)))]
        self._known: dict[object, list[_Kept]] = {}
        self._known_choices: dict[object, _Choices] = {}

    def members(self, start: int, end: int) -> list[Member]:
        """Return the calls from `start` to `end`, the last one included, as a group."""
        links = [self._links(index) if index > start else {} for index in range(start, end + 1)]
        following = [*links[1:], {}]
        return [
            Member(
                call=caller.call,
                taped_s=caller.taped_s,
                links=frozenset(own),
                outs=frozenset(next_links.values()),
            )
            for caller, own, next_links in zip(self._callers[start : end + 1], links, following, strict=True)
        ]

    def all(self) -> Iterator[tuple[int, int, list[GroupOption]]]:
        """Yield first and last call of each group, and its options."""
        for start in range(len(self._callers) - 1):
            if not self._is_possible(start):
                continue
            for length in _LENGTHS:
                end = start + length - 1
                if end >= len(self._callers) or not all(self._may_join[start + 1 : end + 1]):
                    break
                options = self.options_of(start, end)
                if options:
                    yield start, end, options

    def _is_possible(self, index: int) -> bool:
        """Say whether a call may be in a group: all of it can run again, nothing has to stay."""
        program, options = self._callers[index].call.program, self._options[index]
        call = self._graph.calls[index]
        if len(options) == 1 or call.stays_because or call.modules:
            return False
        # the second forward runs operator by operator, and counts bytes unit by unit
        ends = [(unit.operators[0], unit.operators[-1]) for unit in program.units]
        is_mixed = any(last > first for (_, last), (first, _) in pairwise(sorted(ends)))
        stays = program.pinned or program.older or program.asks_in_forward
        return not (stays or is_mixed) and all(unit.is_repeatable for unit in program.units)

    def _follows(self, index: int) -> bool:
        """Say whether a call may be in one group with the call before it.

        It reads what that call makes, and no other before. Nobody else asks autograd for what it reads, or
        writes to it, and the call that makes it does not need it itself.
        """
        if not (self._is_possible(index) and self._is_possible(index - 1)):
            return False
        call, before = self._callers[index].call, self._callers[index - 1].call
        links = self._links(index)
        linked = {call.outer_storages[-1 - link] for link in links}
        makers = {self._makers.get(storage, index - 1) for storage in call.outer_storages}
        program = before.program
        own = {s for unit in program.units for s in unit.reads} | program.saved
        # parameters that are away when the last block begins its backward
        is_gone = not self._graph.gathered.isdisjoint(before.outer_storages)
        if is_gone or not links or makers != {index - 1} or own.intersection(links.values()):
            return False
        mine, until = self._graph.calls[index].inputs, min(call.asked)
        is_asked_elsewhere = any(s not in mine and self._graph.deaths[s] >= until for s in linked)
        return not is_asked_elsewhere and not any(self._writers.get(s, set()) - {index - 1} for s in linked)

    def _links(self, index: int) -> dict[int, int]:
        outer, before = self._callers[index].call.outer_storages, self._callers[index - 1].call
        made = {storage: number for number, storage in enumerate(before.storages)}
        return {-1 - number: made[storage] for number, storage in enumerate(outer) if storage in made}

    def options_of(self, start: int, end: int, between: tuple[int, int] | None = None) -> list[GroupOption]:
        """Return the options of a group.

        Args:
            start, end: its first and its last call.
            between: the totals of the first and the last option; all that there are if `None`.
        """
        members = self.members(start, end)
        moment = first_ask(members)
        held = self._graph.held_bytes
        now = int(held[moment])
        callers = self._callers[start : end + 1]
        if moment < callers[-1].call.end:  # a gradient is taken within forward
            return []
        bases = [int(held[caller.backward_start]) - now for caller in callers]
        forwards = [int(held[caller.call.start]) for caller in callers]
        choices = [
            self._choices_of(index, member, moment)
            for index, member in zip(range(start, end + 1), members, strict=True)
        ]
        key = (*map(id, choices), *bases, between)
        if key not in self._known:
            self._known[key] = list(_chosen(choices, bases, between))
        found = self._known[key]
        return [_with_forward(each, forwards, now) for each in found]

    def _choices_of(self, index: int, member: Member, moment: int) -> _Choices:
        key = (id(self._options[index]), member.links, member.outs)
        if key not in self._known_choices:
            self._known_choices[key] = self._made_choices(index, member, moment)
        return self._known_choices[key]

    def _made_choices(self, index: int, member: Member, moment: int) -> _Choices:
        caller = self._callers[index]
        found: dict[frozenset[int], None] = dict.fromkeys(
            option.decision.keep
            for option in self._options[index]
            if not option.decision.is_plain and not option.decision.offload
        )
        tried = list(dict.fromkeys([frozenset[int](), *found]))
        known = caller.answers(member, moment, tried)
        match known.read("choices"):
            case list(held):
                return _Choices.of(self._rows(caller, member, list(map(frozenset, held)), moment))
        chosen = _thinned(self._rows(caller, member, tried, moment))
        known.write("choices", [sorted(keep) for keep, *_ in chosen])
        return _Choices.of(chosen)

    def _rows(
        self, caller: CallOptions, member: Member, keeps: Sequence[frozenset[int]], moment: int
    ) -> list[_Row]:
        """Return what a member may keep, and the rows of that in `_Choices`."""
        passed_on = sum(member.call.program.sizes[out] for out in member.outs)
        shares = shares_of(member, keeps, moment, random_state_bytes=self._random_state_bytes)
        found = caller.highest(shares)
        beyond = found.backward + shares.second_bytes - passed_on
        costs = map(self._cost, map(Work, shares.flops.tolist(), shares.seconds.tolist()))
        columns = found.forward, found.left, shares.second_peak_bytes, shares.second_bytes, beyond
        return list(zip(keeps, *(each.tolist() for each in columns), costs, strict=True))


def _thinned(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows that no other one beats, at most so many, cheapest first."""
    numbers = np.array([row[1:] for row in rows], dtype=np.float64)
    order = np.lexsort(numbers.T[::-1])
    order = order[np.argsort(numbers[order, 5], kind="stable")]
    compared = numbers[:, [2, 3, 4]]
    span = compared.max(axis=0) - compared.min(axis=0)
    slack, chosen = 0.0, list(map(int, order))
    while True:
        kept: list[int] = []
        for index in chosen:
            if not kept or not np.any(np.all(compared[kept] <= compared[index] + slack * span, axis=1)):
                kept.append(index)
        smallest = {int(column.argmin()) for column in compared.T}
        chosen = sorted({*kept, *smallest}, key=lambda index: (numbers[index, 5], index))
        if len(chosen) <= _MOST_KEEPS or slack > 1:
            return [rows[index] for index in chosen]
        slack = 2 * slack or 0.002


def _chosen(
    choices: Sequence[_Choices], bases: Sequence[int], between: tuple[int, int] | None
) -> Iterator[_Kept]:
    """Yield the cheapest choices of a group within totals, from the smallest to that of the cheapest one."""
    if between is None:
        least, cheapest = _best(choices, bases, None), _best(choices, bases, np.iinfo(np.int64).max)
        assert least is not None, "without a limit there is a choice"
        assert cheapest is not None, "and here"
        between = least[1], max(cheapest[1], least[1])
    seen: set[tuple[int, ...]] = set()
    for total in np.linspace(*between, _TOTALS).astype(np.int64):
        found = _best(choices, bases, int(total))
        if found is None or tuple(found[0]) in seen:
            continue
        numbers, highest, cost = found
        seen.add(tuple(numbers))
        pairs = list(zip(numbers, choices, strict=True))
        yield _Kept(
            keeps=tuple(each.keeps[number] for number, each in pairs),
            highest=highest,
            forward=tuple(int(each.forward[number]) for number, each in pairs),
            left=tuple(int(each.left[number]) for number, each in pairs),
            cost=cost,
        )


def _with_forward(kept: _Kept, forwards: Sequence[int], now: int) -> GroupOption:
    """Return an option at its place in the step.

    Args:
        forwards: bytes there at the beginning of each forward, without plan.
        now: bytes there when the second forward begins, without plan.
    """
    highest, left = kept.highest + now, 0
    for start, forward, added in zip(forwards, kept.forward, kept.left, strict=True):
        highest = max(highest, left + forward + start)
        left += added
    return GroupOption(
        keeps=kept.keeps, highest_bytes=highest, left_bytes=left, cost=kept.cost, total=kept.highest
    )


def _best(
    choices: Sequence[_Choices], bases: Sequence[int], most: int | None
) -> tuple[list[int], int, float] | None:
    """Return the choice of each member of the least cost within a total; of the least total with `None`.

    With them their highest total and cost. The state is what the members so far have there.
    """
    there, worst = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float64)
    peaks = np.full(1, np.iinfo(np.int64).min)
    back = []
    for each, base in zip(choices, bases, strict=True):
        top = np.maximum(each.peak + each.left, each.backward + base)
        totals = np.maximum(peaks[:, None], there[:, None] + top[None, :])
        sums = there[:, None] + (each.left + each.second)[None, :]
        costs = worst[:, None] + each.cost[None, :]
        fits = np.full(totals.shape, True) if most is None else totals <= most
        before, option = np.nonzero(fits)
        if not len(before):
            return None
        there, peaks, worst = sums[before, option], totals[before, option], costs[before, option]
        goal = peaks if most is None else worst
        order = np.lexsort((peaks, worst, there) if most is not None else (worst, peaks, there))
        best = np.minimum.accumulate(goal[order])
        is_better = np.concatenate([[True], goal[order][1:] < best[:-1]])
        order = order[is_better]
        if len(order) > _MOST_STATES:
            order = order[np.linspace(0, len(order) - 1, _MOST_STATES).astype(np.intp)]
        there, peaks, worst = there[order], peaks[order], worst[order]
        back.append((before[order], option[order]))
    state = int(np.lexsort((worst, peaks) if most is None else (peaks, worst))[0])
    highest, cost = int(peaks[state]), float(worst[state])
    numbers: list[int] = []
    for before, option in reversed(back):
        numbers.append(int(option[state]))
        state = int(before[state])
    return numbers[::-1], highest, cost
