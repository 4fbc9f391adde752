"""Trials as elements of job arrays, one array a resource shape, submitted with submitit."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from harness.errors import ConfigError, optional_package, require_at_least
from harness.experiment.mesh import Mesh
from harness.launchers import slurm_client as slurm
from harness.launchers import slurm_submit
from harness.launchers.base import Collected, InFlight, Run, Sweep, arrivals
from harness.launchers.lane_spec import PROGRAM, STOP, LaneSpec
from harness.launchers.resource_shape import Resources, Shape, by_shape
from harness.launchers.run_task import now, refuse_task, unusable_task
from harness.launchers.slurm_ends import Look
from harness.launchers.task import Task
from harness.records.claims import (
    Submission,
    claim_unless_begun,
    claimant,
    folder_of,
    holding,
    is_held,
    new_submission,
    read_attempt,
    read_submission,
    record_for,
    release,
    write_submission,
)
from harness.records.record import Record
from harness.records.store import Store

_EARLY_S = 60
"""How much too early Slurm may announce a time limit."""

_HARDWARE = ("partition", "constraint", "nodelist", "gres", "gpus", "gpus_per_node", "gpus_per_task")
_MEMORY = ("mem", "mem_per_cpu", "mem_per_gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class OnSlurm(slurm.JobOptions, ABC):
    """The common part of all ways to run a sweep through Slurm.

    Fields:
        wait: follow the jobs to their records; otherwise return after submission, and the same command later
            collects what has ended and continues.
        gpus_per_node: GPUs that a job asks for on each of its nodes; `None` leaves it to the launcher.
        poll_s: seconds between two questions to Slurm.
    """

    launcher: ClassVar[str]

    wait: bool = True
    cpus_per_rank: int = 1
    gpus_per_node: int | None = None
    poll_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse options that Slurm or a trial could not keep."""
        optional_package("submitit", where="hydra/launcher", extra="slurm")
        require_at_least("hydra.launcher.time_min", self.time_min, 2)  # Slurm announces it up to 1 min early
        require_at_least("hydra.launcher.cpus_per_rank", self.cpus_per_rank, 1)
        require_at_least("hydra.launcher.signal_delay_s", self.signal_delay_s, 0)
        require_at_least("hydra.launcher.poll_s", self.poll_s, 0.05)
        require_at_least("hydra.launcher.gpus_per_node", self.gpus_per_node or 0, 0)
        if self.signal_delay_s + _EARLY_S >= self.time_min * 60:
            raise ConfigError(
                "hydra.launcher.signal_delay_s",
                f"must leave trials some of {self.time_min} min, of which Slurm may take {_EARLY_S} s more, "
                f"got {self.signal_delay_s}",
            )

    @property
    def uses_agent(self) -> bool:
        """False: trials run in jobs, whose lanes have agents of their own."""
        return False

    @abstractmethod
    def check(self, mesh: Mesh) -> None:
        """Refuse what can be told before submission.

        Raises:
            ConfigError: naming the option and what it would have to be.
        """

    def place(self, mesh: Mesh) -> dict[str, Any]:
        """Return what is asked of the cluster, because nobody knows yet which node it will be."""
        others = {key.replace("-", "_"): value for key, value in (self.additional_parameters or {}).items()}
        own = {name: getattr(self, name) for name in ("partition", "constraint", "gpus_per_node")}
        users = {name: os.environ.get(f"SBATCH_{name.upper()}") for name in ("partition", "constraint")}
        asked = {name: value for name, value in own.items() if value is not None}
        known = users | asked | others
        words = {name: str(known[name]) for name in (*_HARDWARE, *_MEMORY) if known.get(name) is not None}
        return {
            "device": {"slurm": words, "device": mesh.device},
            "cpus": self.cpus_per_rank * mesh.ranks_per_node,
            "driver": None,
        }

    def collect(self, store: Store, name: str, tasks: Sequence[Task]) -> Collected:  # noqa: ARG002 (protocol)
        """Return the records of earlier submissions that nobody has collected, and what is on its way."""
        slurm.require_slurm()
        with _reachable():
            return self._collect(store, tasks)

    def _collect(self, store: Store, tasks: Sequence[Task]) -> Collected:
        """Return the records of this driver's former submissions, and their trials that still run."""
        claimed = [(task, claimant(store, task.trial_id)) for task in tasks]
        submissions = self._own_submissions(store, {claim for _, claim in claimed if claim is not None})
        ours = [(task, submissions[claim]) for task, claim in claimed if claim in submissions]
        records: dict[str, Record] = {}
        flights = []
        for task, submission in ours:
            record = record_for(store, task.trial_id, submission.id)
            job = None if record is not None else _job_of(store, task, submission)
            if record is not None:
                release(store, task.trial_id, submission.id)
                if record.environment_id == task.environment_id:  # else the sources have changed since
                    records[task.trial_id] = record
            elif job is not None:
                flights.append(InFlight(task=task, submission=submission.id, job=job))
        for submission in submissions.values():
            if not submission.is_submitted:
                unnoted = set(slurm.find(submission.job_name)) - set(submission.jobs.values())
                slurm.cancel(unnoted, pending_only=True)  # its driver died while submitting
        return Collected(records=records, flights=flights)

    def _own_submissions(self, store: Store, names: Collection[str]) -> dict[str, Submission]:
        """Return those submissions of `names`, by id, that this launcher made and whose file is there."""
        known = {name: read_submission(store, name) for name in names}
        return {
            name: submission
            for name, submission in known.items()
            if submission is not None and submission.launcher == self.launcher
        }

    def dispatch(self, sweep: Sweep, tasks: Sequence[Task], flights: Sequence[InFlight]) -> Run:
        """Submit `tasks` and return the run that follows them, and `flights`, to their records."""
        refusals: list[tuple[Task, ConfigError]] = []
        new: list[InFlight] = []
        unusable: list[Record] = []
        if tasks and not sweep.interrupts.stop_requested:
            with _reachable():
                submission = new_submission(self.launcher, now())
                free, new, unusable = claim_free(sweep, submission, tasks)
                if free:
                    with _released_unless_submitted(sweep.store, submission, free):
                        new += self._hand_over(sweep, submission, free, refusals)
            if refusals and not new and not flights:
                raise refusals[0][1]
        found = unusable + [
            refuse_task(task, str(error), store=sweep.store, name=sweep.name) for task, error in refusals
        ]
        return self._run(sweep, found, [*new, *flights], mine={flight.submission for flight in new})

    @abstractmethod
    def batches(self, tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
        """Return what is submitted together."""

    @abstractmethod
    def submit(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> list[str]:
        """Submit one batch; return the job id of each trial.

        Raises:
            ConfigError: it does not fit, or sbatch refuses it.
        """

    def request(self, submission: Submission, **resources: Any) -> slurm_submit.Request:
        """Return what is asked of sbatch: what all jobs ask for, and `resources`."""
        options = {field.name: getattr(self, field.name) for field in fields(slurm.JobOptions)}
        return slurm_submit.Request(name=submission.job_name, **options, **resources)

    def _hand_over(
        self,
        sweep: Sweep,
        submission: Submission,
        tasks: Sequence[Task],
        refusals: list[tuple[Task, ConfigError]],
    ) -> list[InFlight]:
        """Submit; `refusals` gets what is refused. Jobs that are in the queue are written down at once."""
        store = sweep.store
        jobs: dict[str, str] = {}
        for group in self.batches(tasks):
            try:
                found = self.submit(sweep, submission, group)
            except ConfigError as error:
                refusals += [(task, error) for task in group]
                continue
            jobs |= dict(zip((task.trial_id for task in group), found, strict=True))
            write_submission(store, replace(submission, jobs=jobs))
        write_submission(store, replace(submission, jobs=jobs, is_submitted=True))
        for task, _ in refusals:
            release(store, task.trial_id, submission.id)
        if jobs:
            ids = sorted({job.partition("_")[0] for job in jobs.values()}, key=int)
            sys.stderr.write(f"submitted {len(jobs)} points as Slurm jobs {', '.join(ids)}\n")
        return [
            InFlight(task=task, submission=submission.id, job=jobs[task.trial_id])
            for task in tasks
            if task.trial_id in jobs
        ]

    def _run(
        self, sweep: Sweep, refusals: Sequence[Record], flights: Sequence[InFlight], mine: Collection[str]
    ) -> Iterator[Record]:
        """Yield the records of refused trials, then those of trials that jobs carry, as they arrive."""
        yield from refusals
        if not self.wait:
            return
        with ExitStack() as held:
            for submission in mine:
                held.enter_context(holding(sweep.store, submission))
            is_stopping = False
            for record in arrivals(sweep, flights, Look(sweep=sweep, time_min=self.time_min).ends):
                if record is not None:
                    yield record
                    continue
                if sweep.interrupts.stop_requested and not is_stopping:
                    is_stopping = True
                    stop(sweep.store, flights, mine)
                time.sleep(self.poll_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm(OnSlurm):
    """One array a shape, one element a trial; Slurm decides when and where each of them runs.

    `gpus_per_node` of `None` is one a rank where the partition has GPUs and the mesh is not on the CPU.

    Fields:
        array_parallelism: elements of an array that run at once.
    """

    launcher: ClassVar[str] = "slurm"

    array_parallelism: int = 256

    def __post_init__(self) -> None:
        # slots=True makes a new class, so a bare super() would look at the one it replaced
        OnSlurm.__post_init__(self)
        require_at_least("hydra.launcher.array_parallelism", self.array_parallelism, 1)

    def check(self, mesh: Mesh) -> None:
        """Refuse more ranks than the GPUs that were asked for; the rest the cluster refuses at submission."""
        asked = self.gpus_per_node
        if asked is not None and 0 < asked < mesh.ranks_per_node and mesh.device != "cpu":
            problem = f"{mesh.label} has {mesh.ranks_per_node} ranks on a node"
            raise ConfigError("hydra.launcher.gpus_per_node", f"{problem}, got {asked}")

    def batches(self, tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
        """Return the trials by shape."""
        return list(by_shape((task.shape, task) for task in tasks).values())

    def submit(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> list[str]:
        """Submit one array."""
        shape = tasks[0].shape
        folder = folder_of(sweep.store, submission.id).absolute()
        cores = self.cpus_per_rank * shape.ranks_per_node
        calls = []
        for task in tasks:
            spec = LaneSpec(
                name=task.trial_id,
                launcher=self.launcher,
                submission=submission.id,
                root=sweep.store.root.absolute(),
                sweep=sweep.name,
                tasks=(task,),
                resources=Resources(core_count=cores),
                sys_path=absolute_sys_path(),
            )
            calls.append(slurm_submit.JobCall((*PROGRAM, str(spec.write()))))
        request = self.request(
            submission,
            nodes=shape.nodes,
            cpus_per_task=cores,
            gpus_per_node=self._gpus(shape),
            array_parallelism=self.array_parallelism,
        )
        return slurm_submit.submit(calls, request, folder / "jobs")

    def _gpus(self, shape: Shape) -> int:
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if shape.device == "cpu" or slurm.cluster_gpus(self.partition) == 0:
            return 0
        return shape.ranks_per_node


@contextmanager
def _reachable() -> Iterator[None]:
    """Refuse to plan without Slurm; later on, it is waited for. Raises ConfigError: it does not answer."""
    try:
        yield
    except slurm.SlurmUnreachableError as error:
        raise ConfigError("hydra/launcher", f"Slurm does not answer: {error}") from error


@contextmanager
def _released_unless_submitted(store: Store, submission: Submission, tasks: Sequence[Task]) -> Iterator[None]:
    """End the claims on trials that no job carries where their submission fails: nobody will run them."""
    try:
        yield
    except Exception:
        known = read_submission(store, submission.id) or submission
        for task in tasks:
            if task.trial_id not in known.jobs:
                release(store, task.trial_id, submission.id)
        raise


def stop(store: Store, flights: Sequence[InFlight], mine: Collection[str]) -> None:
    """Let waiting jobs never begin and lanes end after their trials, but not those of a living driver."""
    for submission in {flight.submission for flight in flights}:
        if submission in mine or not is_held(store, submission):
            jobs = {flight.job for flight in flights if flight.job and flight.submission == submission}
            store.write_file(folder_of(store, submission) / STOP, "")
            with suppress(slurm.SlurmUnreachableError):  # its lanes read the file
                slurm.cancel(jobs, pending_only=True)


def claim_free(
    sweep: Sweep, submission: Submission, tasks: Sequence[Task]
) -> tuple[list[Task], list[InFlight], list[Record]]:
    """Write down a new submission and claim `tasks` for it.

    Returns:
        Those trials, those that jobs have begun, and records of those whose folders cannot be used.
    """
    write_submission(sweep.store, submission)
    free, begun, unusable = [], [], []
    for task in tasks:
        try:
            attempt = claim_unless_begun(sweep.store, task.trial_id, submission)
        except OSError as error:
            unusable.append(unusable_task(task, error, name=sweep.name))
            continue
        if attempt is None:
            free.append(task)
        else:
            begun.append(InFlight(task=task, submission=attempt.submission, job=attempt.job))
    return free, begun, unusable


def absolute_sys_path() -> tuple[str, ...]:
    """Return where Python finds modules, valid in any working directory."""
    return tuple(str(Path(each).absolute()) for each in sys.path)


def _job_of(store: Store, task: Task, submission: Submission) -> str | None:
    """Return the job of a claimed trial; `None` where its driver died before there was one."""
    if task.trial_id in submission.jobs:
        return submission.jobs[task.trial_id]
    attempt = read_attempt(store, task.trial_id, submission.id)
    return None if attempt is None else attempt.job
