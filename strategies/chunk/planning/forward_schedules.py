"""Schedules of all scopes of a model for a forward without gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from torch import fx

from strategies.chunk.flow.chunk_rules import has_pictures
from strategies.chunk.loops.schedule import Schedule
from strategies.chunk.planning.forward_search import ForwardSearch
from strategies.chunk.planning.scope_schedules import (
    ModelSchedule,
    ModelScopes,
    ScopeKind,
    ScopeScheduler,
    inputs_at,
)
from strategies.chunk.planning.windows import LoopPlacer


class ForwardSchedules:
    """Schedules of one model; scopes of one kind are searched once.

    Args:
        rehearse: returns the peak in bytes of the whole pass under schedulers, by FQN.
        held_bytes: bytes that are alive besides the scopes all the time.
    """

    def __init__(
        self,
        scopes: ModelScopes,
        rehearse: Callable[[Mapping[str, ScopeScheduler]], int],
        held_bytes: int = 0,
    ) -> None:
        self._scopes = scopes
        self._rehearse = rehearse
        self._held_bytes = held_bytes
        self._rehearsed: dict[int, ModelSchedule] = {}
        self._fitted: dict[Hashable, Schedule] = {}
        self._placers: dict[tuple[ScopeKind, bool], LoopPlacer] = {}

    def fastest(self, budget_bytes: int | None) -> tuple[ModelSchedule, int]:
        """Return the fastest schedule that a rehearsal finds within the budget, and the smallest peak seen.

        Without a budget, and where nothing fits, the schedule is the smallest one.
        """
        smallest = self.within(0)
        if budget_bytes is None:
            return smallest, smallest.peak_bytes
        found = smallest, self.within(budget_bytes)
        chosen = min(found, key=lambda each: (each.peak_bytes > budget_bytes, each.slowdown))
        return chosen, min(each.peak_bytes for each in found)

    def within(self, goal: int) -> ModelSchedule:
        """Return the schedule that the search finds for a goal in bytes, with the peak of its rehearsal."""
        if goal not in self._rehearsed:
            found = self._searched(max(goal - self._held_bytes, 0))
            peak_bytes = self._rehearse(found.schedulers(self._scopes.machine))
            self._rehearsed[goal] = replace(found, peak_bytes=peak_bytes)
        return self._rehearsed[goal]

    def _searched(self, goal: int) -> ModelSchedule:
        """Return the schedules whose estimated peak is at most `goal`, or near the smallest."""
        scopes, machine = self._scopes, self._scopes.machine
        first = root = scopes.plain[scopes.kinds[-1]]
        donated = root.donations()
        for _ in range(2):  # loops of the root may let other inputs of calls live longer
            schedules, goals, calls = [], [], {}
            before = dict(zip(root.items, root.profile().before_bytes, strict=True))
            for call, kind in zip(scopes.calls, scopes.kinds[:-1], strict=True):
                goals.append(max(goal - before[call], 0))
                schedules.append(self._fit(kind, donated[call], goals[-1]))
                calls[call] = schedules[-1].profile().peak_bytes - sum(root.storages.made[call].values())
            root = self._best(scopes.kinds[-1], replace(first, calls=calls), goal)
            if root.donations() == donated:
                break
            donated = root.donations()
        schedules.append(root)
        return ModelSchedule(
            graphs=scopes.graphs,
            schedules=schedules,
            goals=[*goals, goal],
            recomputes=[False] * len(schedules),
            peak_bytes=root.profile().peak_bytes,
            slowdown=(sum(schedule.seconds(machine) for schedule in schedules) + scopes.checks_s)
            / (scopes.seconds or 1.0),
        )

    def _fit(self, kind: ScopeKind, donated: frozenset[int], goal: int) -> Schedule:
        key = kind, donated, goal
        if key not in self._fitted:
            plain = self._scopes.plain[kind]
            self._fitted[key] = self._best(kind, plain, goal, inputs_at(plain.graph, donated))
        return self._fitted[key]

    def _best(
        self, kind: ScopeKind, schedule: Schedule, goal: int, donated: frozenset[fx.Node] = frozenset()
    ) -> Schedule:
        """Return what is found for a goal; pictures are cut inside where that needs less than any other way.

        All searches on the graph of a kind place loops from the same regions.
        """
        best = None
        for may_overlap in (False, True) if has_pictures(schedule.graph) else (True,):
            key = kind, may_overlap
            if key not in self._placers:
                self._placers[key] = LoopPlacer(self._scopes.plain[kind], may_overlap=may_overlap)
            found = ForwardSearch(schedule, self._scopes.machine, donated, self._placers[key]).fit(goal)
            if best is None or found.profile().peak_bytes < best.profile().peak_bytes:
                best = found
            if best.profile().peak_bytes <= goal:
                break
        assert best is not None
        return best
