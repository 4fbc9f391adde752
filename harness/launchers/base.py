"""The contract between a launcher and a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.experiment.mesh import Mesh
from harness.launchers.interrupts import Interrupts
from harness.launchers.packing import Packer
from harness.launchers.progress import SweepProgress
from harness.launchers.run_task import lost_task, unusable_task
from harness.launchers.task import Task
from harness.ranks.agent import Agent
from harness.records.claims import claim, claimant, read_trouble, record_for, release
from harness.records.record import Failure, Record
from harness.records.store import Store

_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The side of a sweep that its launcher sees.

    Fields:
        rerun: whether finished trials run again.
        interrupts: the user's requests to stop.
        agent: agent for trials that run in this process.
    """

    store: Store
    name: str
    rerun: bool
    progress: SweepProgress
    interrupts: Interrupts
    agent: Agent


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """A trial that was handed to a launcher and has no record yet. `job`: id of the scheduler's job."""

    task: Task
    submission: str
    job: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The end of a job or lane whose trial left no record.

    Fields:
        status: `lost`, `timeout` or `oom`; `failed` where its folder could not be used.
    """

    status: str
    kind: str
    message: str


_NOT_BEGUN = End(status="lost", kind="lost", message="the lanes ended before this trial began")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Results of earlier submissions of the same sweep.

    Fields:
        records: records of trials that ended since the last command asked.
        flights: trials that are still on their way.
    """

    records: Mapping[str, Record]
    flights: Sequence[InFlight]


Run = Iterator[Record]
"""Records, each as soon as it is on disk; ends early when the sweep was interrupted."""


class Launcher(Protocol):
    """A way to run trials; also its settings."""

    @property
    def uses_agent(self) -> bool:
        """True if `Sweep.agent` runs the trials, in this process."""

    def check(self, mesh: Mesh) -> None:
        """Refuse a mesh that this launcher cannot run.

        Raises:
            ConfigError: naming the mesh and what would fit.
        """

    def place(self, mesh: Mesh) -> dict[str, Any]:
        """Return what is known before of the place where a trial on `mesh` will run.

        These entries stand for those of the environment in its address: for the device where that is not
        known yet, what was asked for.
        """

    def collect(self, store: Store, name: str, tasks: Sequence[Task]) -> Collected:
        """Return what earlier submissions of these trials came to; the caller holds the sweep's lock."""

    def dispatch(self, sweep: Sweep, tasks: Sequence[Task], flights: Sequence[InFlight]) -> Run:
        """Hand `tasks` over before it returns; the run then follows them, and `flights`, to their records.

        The caller holds the sweep's lock during the call, not while it iterates.
        """


Ends = Callable[[Sequence[InFlight]], Mapping[str, End | None]]


def arrivals(sweep: Sweep, flights: Iterable[InFlight], ends: Ends) -> Iterator[Record | None]:
    """Yield the record of each trial when it arrives, and `None` after each look, for the caller to pause.

    Args:
        ends: called with the trials that have no record yet; returns, by trial_id, how the job or lane of
            those that have ended did. Such a trial gets a record that says so; where the value is `None`
            it gets none and is followed no longer.
    """
    open_ = {flight.task.trial_id: flight for flight in flights}
    while open_:
        ended = ends(list(open_.values()))  # asked first: a record written just before the end is not missed
        for trial_id, flight in list(open_.items()):
            record, is_closed = landed(sweep.store, flight), trial_id in ended
            if record is None and is_closed:
                record, is_closed = _close(sweep, flight, ended[trial_id])
            if record is not None or is_closed:
                del open_[trial_id]
                release(sweep.store, trial_id, flight.submission)
            if record is not None:
                sweep.progress.point_finished(flight.task.label, record.status, record.verdict)
                yield record
        yield None


def follow_packer(sweep: Sweep, packer: Packer, flights: Sequence[InFlight]) -> Iterator[Record]:
    """Keep a packer going and yield the records of its trials."""
    is_stopping = is_over = False

    def ends(open_: Sequence[InFlight]) -> dict[str, End | None]:
        """Return an end for every open trial once no lane runs; a stopped sweep writes no record of them."""
        end = None if is_stopping else _NOT_BEGUN
        return dict.fromkeys((flight.task.trial_id for flight in open_), end) if is_over else {}

    for record in arrivals(sweep, flights, ends):
        if record is not None:
            yield record
            continue
        if sweep.interrupts.stop_requested and not is_stopping:
            packer.stop()
            is_stopping = True
        is_over = packer.advance()
        time.sleep(_LOOK_S)
    while not packer.advance():  # lanes that have heard of no more trials end by themselves
        time.sleep(_LOOK_S)


def _close(sweep: Sweep, flight: InFlight, end: End | None) -> tuple[Record | None, bool]:
    """Return the record of a trial whose job or lane has ended, and whether to stop following it.

    If another process runs the trial by now, its record is awaited.
    """
    trouble = read_trouble(sweep.store, flight.task.trial_id, flight.submission)
    if trouble is not None and end is not None:
        end = End(status="failed", kind=trouble.kind, message=trouble.message)
    try:
        with sweep.store.locked(flight.task.trial_id) as is_free:
            return _closed(sweep, flight, end) if is_free else (None, False)
    except OSError as error:
        return unusable_task(flight.task, error, name=sweep.name), True


def _closed(sweep: Sweep, flight: InFlight, end: End | None) -> tuple[Record | None, bool]:
    """Return the record of a task whose job has ended, written here where the job left none."""
    record = landed(sweep.store, flight)
    is_ours = claimant(sweep.store, flight.task.trial_id) == flight.submission
    if record is None and end is not None and is_ours:
        error = Failure(kind=end.kind, message=end.message)
        job = {"submission": flight.submission, "id": flight.job}
        record = lost_task(flight.task, error, store=sweep.store, name=sweep.name, job=job, status=end.status)
    return record, True


def claimed(sweep: Sweep, submission: str, tasks: Sequence[Task]) -> tuple[list[Task], list[Record]]:
    """Claim trials for a submission; return those, and records of those whose folders cannot be used."""
    usable, records = [], []
    for task in tasks:
        try:
            claim(sweep.store, [task.trial_id], submission)
            usable.append(task)
        except OSError as error:
            records.append(unusable_task(task, error, name=sweep.name))
            sweep.progress.point_finished(task.label, records[-1].status, records[-1].verdict)
    return usable, records


def landed(store: Store, flight: InFlight) -> Record | None:
    """Return the record of a trial in flight if it has arrived."""
    return record_for(store, flight.task.trial_id, flight.submission)
