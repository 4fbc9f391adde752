"""Lanes on the slices of a pool: as many at once as fit, each on devices and cores of its own.

The same program packs this machine, where lanes are child processes, and an allocation of a scheduler, where
lanes are steps. If a lane dies, the trial that it ran gets a record that says so, and another lane takes the
remaining trials.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from harness.launchers.lane_spec import STOP, TERMINATED_STATUS, TIME_LIMIT_STATUS, LaneSpec
from harness.launchers.resource_shape import Resources, Shape
from harness.launchers.run_task import lost_task
from harness.launchers.task import Task
from harness.records.claims import (
    Trouble,
    claimant,
    folder_of,
    read_attempt,
    read_trouble,
    record_for,
    write_trouble,
)
from harness.records.record import Failure
from harness.records.store import Store

_FRUITLESS = 3
"""Number of lanes in a row that may end without beginning a trial; after them the trials count as lost."""

_TOLD_S = 15.0
"""Time for which no lane replaces one that was told to end: the allocation may be about to go."""

_SIGNAL_BASE = 128  # of a shell's exit status, and srun's


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The share of a pool that a lane takes.

    Fields:
        nodes: hosts, >= 1.
        gpus, cores: number on each of them, >= 0.
    """

    nodes: int
    gpus: int
    cores: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Part of a pool.

    Fields:
        gpus, cores: indices by host, disjoint from those of every other slice.
    """

    gpus: Mapping[str, tuple[int, ...]]
    cores: Mapping[str, tuple[int, ...]]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the slice."""
        return tuple(self.cores)


class Pool:
    """GPUs and cores of some hosts, of which slices are taken and given back."""

    def __init__(self, hosts: Sequence[str], *, gpus: Sequence[int], cores: Sequence[int]) -> None:
        self._gpus = {host: list(gpus) for host in hosts}
        self._cores = {host: list(cores) for host in hosts}

    def take(self, need: Need) -> Slice | None:
        """Return a slice for `need`, on the hosts with least to spare; `None` where none fits now."""
        fitting = [
            host
            for host in self._cores
            if len(self._gpus[host]) >= need.gpus and len(self._cores[host]) >= need.cores
        ]
        if len(fitting) < need.nodes:
            return None
        fitting.sort(key=lambda host: (len(self._gpus[host]), len(self._cores[host])))
        chosen = sorted(fitting[: need.nodes], key=list(self._cores).index)
        return Slice(
            gpus={host: _cut(self._gpus[host], need.gpus) for host in chosen},
            cores={host: _cut(self._cores[host], need.cores) for host in chosen},
        )

    def give(self, slice_: Slice) -> None:
        """Take a slice back."""
        for host in slice_.hosts:
            self._gpus[host] = sorted([*self._gpus[host], *slice_.gpus[host]])
            self._cores[host] = sorted([*self._cores[host], *slice_.cores[host]])


Start = Callable[[LaneSpec, Slice], subprocess.Popen[bytes]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The pool that the lanes of a submission share.

    Fields:
        launcher, submission: names that every lane has in common.
        needs: what a lane of each shape takes; each fits the pool when it is empty.
        most: number of lanes at once.
        start: starts the process of a lane on a slice.
        resources: what a trial may use of every node of a slice.
        restarts: number of earlier starts of this allocation by the scheduler.
        driver_pid: process whose death ends the lanes; `None` where a scheduler ends them.
    """

    launcher: str
    submission: str
    store: Store
    sweep: str
    needs: Mapping[Shape, Need]
    most: int
    start: Start
    resources: Callable[[Slice], Resources]
    restarts: int = 0
    driver_pid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """A lane that has started and whose end is not recorded yet."""

    spec: LaneSpec
    slice_: Slice
    shape: Shape
    process: subprocess.Popen[bytes]


@dataclass(kw_only=True, slots=True)
class Packer:
    """Runs lanes until no task is left; a context manager that ends what still runs."""

    packing: Packing
    tasks: Mapping[Shape, Sequence[Task]]
    pool: Pool
    _waiting: list[Shape] = field(init=False)
    _running: list[_Running] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)
    _started: int = 0
    _fruitless: dict[Shape, int] = field(default_factory=dict)
    _resume_s: float = 0.0
    _is_ending: bool = False

    def __post_init__(self) -> None:
        # the largest first: small lanes fill what they leave
        self._waiting = sorted(self.tasks, key=lambda shape: -shape.nodes * shape.ranks_per_node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            running.process.wait()

    def advance(self) -> bool:
        """Collect ended lanes and start new ones; return True when no lane is running."""
        for running in [each for each in self._running if each.process.poll() is not None]:
            self._running.remove(running)
            self.pool.give(running.slice_)
            self._record_end(running)
        if self._is_ending or self._stop_file.exists():
            self._waiting.clear()
        is_told = time.monotonic() < self._resume_s
        for shape in list(self._waiting) if not is_told else ():
            self._start(shape)
        return not self._running and not (is_told and self._waiting)

    def record_earlier_deaths(self) -> None:
        """Write the records of trials that ran when an earlier run of this allocation died."""
        store, submission = self.packing.store, self.packing.submission
        for task in (task for tasks in self.tasks.values() for task in tasks):
            attempt = read_attempt(store, task.trial_id, submission)
            has_died = (
                attempt is not None and not attempt.yielded and attempt.restarts < self.packing.restarts
            )
            if attempt is not None and has_died and not self._has_record(task):
                where = ", ".join(attempt.hosts)
                message = f"a node of job {attempt.job} failed ({where})"
                self._record_lost(task, attempt.lane, "NODE_FAIL", message)

    def end_soon(self) -> None:
        """Start no more lanes, and blame none: the whole allocation is being ended from outside.

        Whoever follows its job knows why: it was cancelled, or preempted.
        """
        self._is_ending = True

    def stop(self) -> None:
        """Let the lanes end after their running trials."""
        self.packing.store.write_file(self._stop_file, "")

    @property
    def _stop_file(self) -> Path:
        return folder_of(self.packing.store, self.packing.submission) / STOP

    def _start(self, shape: Shape) -> None:
        """Start lanes of one shape until tasks or resources are used up."""
        packing, tasks = self.packing, self.tasks[shape]
        while len(self._running) < packing.most:
            slice_ = self.pool.take(packing.needs[shape])
            if slice_ is None:
                return
            lanes = sum(running.shape == shape for running in self._running)
            if lanes >= len(self._untaken(shape)):
                self.pool.give(slice_)
                if lanes == 0:
                    self._waiting.remove(shape)
                return
            spec = LaneSpec(
                name=f"{packing.restarts}-{self._started}",
                launcher=packing.launcher,
                submission=packing.submission,
                root=packing.store.root,
                sweep=packing.sweep,
                tasks=tuple(tasks),
                resources=packing.resources(slice_),
                sys_path=tuple(sys.path),
                driver_pid=packing.driver_pid,
            )
            self._started += 1
            process = packing.start(spec, slice_)
            self._running.append(_Running(spec=spec, slice_=slice_, shape=shape, process=process))

    def _untaken(self, shape: Shape) -> list[Task]:
        store, submission = self.packing.store, self.packing.submission
        left = [task for task in self.tasks[shape] if task.trial_id not in self._taken]
        attempts = {task.trial_id: read_attempt(store, task.trial_id, submission) for task in left}
        self._taken |= {
            trial_id for trial_id, attempt in attempts.items() if attempt is not None and not attempt.yielded
        } | {
            trial_id
            for trial_id in attempts
            if claimant(store, trial_id) != submission or read_trouble(store, trial_id, submission)
        }
        return [task for task in left if task.trial_id not in self._taken]

    def _record_end(self, running: _Running) -> None:
        """Write the record of each trial that an ended lane had begun and not finished."""
        code = running.process.returncode
        begun = self._attempted_by(running)
        left = [task for task in begun if not self._has_record(task)]
        row = 0 if begun or code == 0 else self._fruitless.get(running.shape, 0) + 1
        if code == TIME_LIMIT_STATUS:
            self._end_of_time()
        elif code in {TERMINATED_STATUS, -signal.SIGTERM}:
            self._resume_s = time.monotonic() + _TOLD_S
        elif code != 0 and not self._is_ending:
            self._record_failure(running, left, "while the trial ran")
            if row >= _FRUITLESS and not any(each.shape == running.shape for each in self._running):
                self._record_failure(running, self._untaken(running.shape), "before the trial began")
        self._fruitless[running.shape] = row
        if running.shape not in self._waiting and code != TIME_LIMIT_STATUS and not self._is_ending:
            self._waiting.append(running.shape)

    def _record_failure(self, running: _Running, tasks: Sequence[Task], when: str) -> None:
        """Write that a lane failed into the records of these trials."""
        code, name = running.process.returncode, running.spec.name
        log = running.spec.folder / f"lane-{name}.log"
        where = f"on {', '.join(running.slice_.hosts)}{f'; see {log.name}' if log.exists() else ''}"
        for task in tasks:
            self._record_lost(task, name, _kind(code), f"the lane {_in_words(code)} {when}, {where}")

    def _end_of_time(self) -> None:
        """Write the records of trials that can no longer begin."""
        for shape in self._waiting:
            for task in self._untaken(shape):
                message = "the time limit of the allocation was reached before the trial began"
                self._record_lost(task, "", "TIMEOUT", message, status="timeout")
        self._waiting.clear()

    def _attempted_by(self, running: _Running) -> list[Task]:
        store, submission = self.packing.store, self.packing.submission
        attempts = {
            task.trial_id: read_attempt(store, task.trial_id, submission)
            for task in self.tasks[running.shape]
        }
        own = {
            trial_id
            for trial_id, attempt in attempts.items()
            if attempt is not None and attempt.lane == running.spec.name and not attempt.yielded
        }
        return [task for task in self.tasks[running.shape] if task.trial_id in own]

    def _has_record(self, task: Task) -> bool:
        return record_for(self.packing.store, task.trial_id, self.packing.submission) is not None

    def _record_lost(self, task: Task, lane: str, kind: str, message: str, status: str = "lost") -> None:
        """Write the record of a trial that its lane lost, unless somebody else has it by now."""
        packing, store = self.packing, self.packing.store
        job = {"launcher": packing.launcher, "submission": packing.submission, "lane": lane}
        error = Failure(kind=kind, message=message)
        try:
            with store.locked(task.trial_id) as is_free:
                if is_free and claimant(store, task.trial_id) == packing.submission:
                    self._taken.add(task.trial_id)
                    lost_task(task, error, store=store, name=packing.sweep, job=job, status=status)
        except OSError as problem:
            trouble = Trouble(kind=type(problem).__name__, message=str(problem))
            write_trouble(store, task.trial_id, packing.submission, trouble)


def _kind(code: int) -> str:
    number = -code if code < 0 else code - _SIGNAL_BASE
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, f"exit {code}")


def _in_words(code: int) -> str:
    kind = _kind(code)
    return f"was killed by {kind}" if kind.startswith("SIG") else f"ended with status {code}"


def _cut(items: list[int], count: int) -> tuple[int, ...]:
    cut = tuple(items[:count])
    del items[:count]
    return cut
