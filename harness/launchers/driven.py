"""Launchers whose driver runs the trials itself; a lock shows other drivers that it lives."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from harness.launchers.base import Collected, End, InFlight, Run, Sweep, arrivals, claimed, landed
from harness.launchers.run_task import now
from harness.launchers.task import Task
from harness.records.claims import (
    DRIVEN,
    Submission,
    claimant,
    holding,
    is_held,
    new_submission,
    read_submission,
    write_submission,
)
from harness.records.record import Record
from harness.records.store import Store

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Driven(ABC):
    """Claims trials, runs them, then waits for those that other drivers had claimed."""

    @abstractmethod
    def run_tasks(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> Iterator[Record]:
        """Run trials and yield their records; stop early when the sweep is interrupted.

        Args:
            submission: the driver's own, for which the trials are claimed.
        """

    def collect(self, store: Store, name: str, tasks: Sequence[Task]) -> Collected:  # noqa: ARG002 (protocol)
        """Return the trials that another live driver holds; trials of a dead driver are free again."""
        found = [(task, claimant(store, task.trial_id)) for task in tasks]
        alive = {each: _is_alive(store, each) for each in {claim for _, claim in found if claim}}
        flights = [
            InFlight(task=task, submission=claim, job=None) for task, claim in found if claim and alive[claim]
        ]
        return Collected(records={}, flights=flights)

    def dispatch(self, sweep: Sweep, tasks: Sequence[Task], flights: Sequence[InFlight]) -> Run:
        """Claim `tasks` and return their run, which then waits for the trials of other drivers.

        Args:
            sweep: store, progress and interrupts.
            flights: the trials that other drivers hold, as `collect` returned them.
        """
        if not tasks and not flights:
            return iter(())
        submission = new_submission(DRIVEN, now())
        write_submission(sweep.store, submission)
        held = ExitStack()
        held.enter_context(holding(sweep.store, submission.id))
        usable, records = claimed(sweep, submission.id, tasks)
        return chain(records, self._run(sweep, submission, usable, flights, held))

    def _run(
        self,
        sweep: Sweep,
        submission: Submission,
        tasks: Sequence[Task],
        flights: Sequence[InFlight],
        held: ExitStack,
    ) -> Iterator[Record]:
        """Run the driver's own trials, then see to those of others.

        Args:
            held: the lock that shows other drivers that this one lives; released at the end.
        """
        with held:
            yield from self.run_tasks(sweep, submission, tasks)
            yield from self._await_others(sweep, submission, flights)

    def _await_others(
        self, sweep: Sweep, submission: Submission, flights: Sequence[InFlight]
    ) -> Iterator[Record]:
        while flights:
            for flight in flights:
                sweep.progress.point_waits(flight.task.label)
            yield from _follow(sweep, flights)
            if sweep.interrupts.stop_requested:
                return
            waiting = [flight.task for flight in flights if landed(sweep.store, flight) is None]
            with sweep.store.planning():  # others wait for the same trials
                flights = self.collect(sweep.store, sweep.name, waiting).flights
                taken = {flight.task.trial_id for flight in flights}
                records, abandoned = _split(sweep, [task for task in waiting if task.trial_id not in taken])
                usable, unusable = claimed(sweep, submission.id, abandoned)
            yield from (*records, *unusable)
            yield from self.run_tasks(sweep, submission, usable)


def _split(sweep: Sweep, tasks: Sequence[Task]) -> tuple[list[Record], list[Task]]:
    records = [(task, _finished(sweep, task)) for task in tasks]
    finished = [record for _, record in records if record is not None]
    return finished, [task for task, record in records if record is None]


def _finished(sweep: Sweep, task: Task) -> Record | None:
    """Return the record of a trial that another waiting driver has run since."""
    record = sweep.store.finished(task.trial_id, task.environment_id)
    if record is not None:
        sweep.progress.point_finished(task.label, record.status, record.verdict)
    return record


def _follow(sweep: Sweep, flights: Sequence[InFlight]) -> Iterator[Record]:
    def ends(open_: Sequence[InFlight]) -> dict[str, End | None]:
        """Return the trials of dead drivers: they get no record, because another driver runs them."""
        dead = [flight for flight in open_ if not _is_alive(sweep.store, flight.submission)]
        return dict.fromkeys(flight.task.trial_id for flight in dead)

    for record in arrivals(sweep, flights, ends):
        if record is not None:
            yield record
        elif sweep.interrupts.stop_requested:
            return
        else:
            time.sleep(_POLL_S)


def _is_alive(store: Store, submission: str) -> bool:
    known = read_submission(store, submission)
    return known is not None and known.launcher == DRIVEN and is_held(store, submission)
