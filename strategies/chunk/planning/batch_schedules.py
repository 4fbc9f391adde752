"""Schedules of a forward without gradients, of all samples at once or of a part of the batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

from strategies.base import StrategyError
from strategies.chunk.flow.batch_flow import BatchFlow
from strategies.chunk.loops.loop import BODY_S, chunk_sizes
from strategies.chunk.planning.forward_schedules import ForwardSchedules
from strategies.chunk.planning.rehearsal import Rehearsal
from strategies.chunk.planning.scope_schedules import ModelSchedule, ModelScopes, checks_s
from strategies.estimate.machine import Machine
from strategies.estimate.operator_cost import bytes_of
from strategies.tracing.scope_graph import ScopeGraph


@dataclass(kw_only=True, slots=True)
class BatchSchedules:
    """Schedules of one model, with or without a loop over its batch around all others.

    Fields:
        machine: device whose time is saved.
        where: configuration path that messages name.
    """

    rehearsal: Rehearsal
    graphs: Sequence[ScopeGraph]
    machine: Machine
    where: str
    _whole: ForwardSchedules
    _flow: BatchFlow | None
    _seconds: float
    _of_parts: dict[int, _PartSchedules | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rehearsal: Rehearsal, graphs: list[ScopeGraph], machine: Machine, where: str
    ) -> BatchSchedules:
        """Return the schedules of a forward that was rehearsed without gradients."""
        scopes = ModelScopes(graphs, machine)
        return cls(
            rehearsal=rehearsal,
            graphs=graphs,
            machine=machine,
            where=where,
            _whole=ForwardSchedules(scopes, rehearsal.peak_bytes),
            _flow=BatchFlow.of(graphs),
            _seconds=scopes.seconds,
        )

    def fastest(self, budget_bytes: int | None) -> tuple[ModelSchedule, int]:
        """Return the fastest schedule that a rehearsal finds within the budget, and the smallest peak seen.

        Without a budget, and where nothing fits, the schedule is the smallest one. Of the parts of the batch
        the largest is taken that fits.
        """
        chosen, minimum = self._whole.fastest(budget_bytes)
        seen = [chosen, *self._in_parts(budget_bytes)]
        minimum = min(minimum, *(each.peak_bytes for each in seen))
        limit = minimum if budget_bytes is None else budget_bytes
        return min(seen, key=lambda each: (max(each.peak_bytes, limit), each.slowdown)), minimum

    def _in_parts(self, budget_bytes: int | None) -> list[ModelSchedule]:
        """Return what is found with a loop over the batch, the largest part that fits last."""
        lengths = [] if self._flow is None else chunk_sizes(self._flow.size)[1:]
        seen: list[ModelSchedule] = []
        if budget_bytes is not None:
            for part in filter(None, map(self._part, lengths)):
                seen.append(part.within(budget_bytes))
                if seen[-1].peak_bytes <= budget_bytes:
                    return seen
        smallest = next(filter(None, map(self._part, reversed(lengths))), None)
        return seen if smallest is None else [*seen, smallest.within(0)]

    def _part(self, length: int) -> _PartSchedules | None:
        """Return the schedules for parts of `length` samples, `None` where the model does not run on them."""
        if length not in self._of_parts:
            self._of_parts[length] = self._recorded(length)
        return self._of_parts[length]

    def _recorded(self, length: int) -> _PartSchedules | None:
        flow = self._flow
        assert flow is not None
        try:
            graphs = self.rehearsal.of_part(flow, length).recorded(self.where)
        except StrategyError:  # forward has the size of the batch written into it
            return None
        if not flow.is_kept_by(self.graphs, graphs, length):
            return None
        scopes = ModelScopes(graphs, self.machine)
        held_bytes = sum(map(bytes_of, flow.results(self.graphs)))
        rehearse = partial(self.rehearsal.peak_bytes, batch=length)
        chunks = ceil(flow.size / length)
        checks = 2 if flow.size % length else 1  # one for each length of chunks
        around_s = checks_s(self.graphs[-1:]) + checks_s(graphs, calls=chunks, checks=checks)
        around_s += chunks * BODY_S + 2 * held_bytes / self.machine.bytes_per_s
        return _PartSchedules(
            schedules=ForwardSchedules(scopes, rehearse, held_bytes),
            length=length,
            share=scopes.seconds / self._seconds,
            checks=scopes.checks_s / self._seconds,
            chunks=chunks,
            around=around_s / self._seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PartSchedules:
    """Schedules of a part of the batch; times are shares of that of the whole batch at once, without loops.

    Fields:
        checks: time in which the programs of a part find that they fit.
        around: time of the loop itself, checks of all parts among it.
    """

    schedules: ForwardSchedules
    length: int
    share: float
    checks: float
    chunks: int
    around: float

    def within(self, goal: int) -> ModelSchedule:
        """Return the schedule that the search finds for a goal in bytes, with the time of all parts."""
        found = self.schedules.within(goal)
        operators = found.slowdown * self.share - self.checks
        return replace(found, batch=self.length, slowdown=self.chunks * operators + self.around)
