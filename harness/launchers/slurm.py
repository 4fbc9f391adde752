"""Trials as elements of job arrays, one array a resource shape, submitted with submitit."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from harness import slurm
from harness.attempts import now, refuse_task
from harness.claims import (
    Submission,
    claim_unless_begun,
    claimant,
    folder_of,
    new_submission,
    read_attempt,
    read_submission,
    record_for,
    release,
    write_submission,
)
from harness.environment import describe
from harness.errors import ConfigError, require_at_least
from harness.experiment import Experiment
from harness.lane import STOP, LaneSpec, run_element
from harness.launchers.base import Collected, End, Flight, Run, Sweep, arrivals
from harness.mesh import Mesh
from harness.record import Record
from harness.shapes import Seat, Shape, by_shape
from harness.store import Store
from harness.submission import Call, Request, SubmissionError, submit
from harness.task import Task

_SETTLE_S = 3.0
"""How long a job must have been over before its trial counts as lost: other nodes' files arrive late."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnSlurm(ABC):
    """What every way to run a sweep through Slurm has in common.

    Fields:
        wait: follow the jobs to their records; otherwise return after submission, and the same command later
            collects what has ended and continues.
        time_min: time limit of a job in minutes.
        partition, account, qos, constraint: as sbatch's options; `None` is the cluster's default.
        cpus_per_rank: cores of a rank.
        signal_delay_s: seconds before the time limit at which a running trial is ended and recorded.
        requeue: let Slurm put a preempted job back into its queue; its trials then run again.
        poll_s: seconds between two questions to Slurm.
        setup: shell lines that run in every job first.
        python: shell command of the interpreter in a job; this one when `None`.
        additional_parameters: any other option of sbatch, `{reservation: x}`.
    """

    launcher: ClassVar[str]

    wait: bool = True
    time_min: int = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_rank: int = 1
    signal_delay_s: int = 60
    requeue: bool = True
    poll_s: float = 1.0
    setup: tuple[str, ...] = ()
    python: str | None = None
    additional_parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        require_at_least("hydra.launcher.time_min", self.time_min, 1)
        require_at_least("hydra.launcher.cpus_per_rank", self.cpus_per_rank, 1)
        require_at_least("hydra.launcher.signal_delay_s", self.signal_delay_s, 0)
        require_at_least("hydra.launcher.poll_s", self.poll_s, 0.05)

    def check(self, mesh: Mesh) -> None:  # noqa: B027 (deliberately nothing)
        """Refuse nothing: what does not fit the cluster is refused by it, at submission."""

    def environment(self, experiment: Experiment) -> dict[str, Any]:
        """Return the software of this machine, and in place of the device what is asked of the cluster."""
        asked = [self.partition, self.constraint, experiment.mesh.device]
        return describe("cpu", experiment.files) | {
            "device": f"slurm {'/'.join(each or '*' for each in asked)}",
            "cpus": self.cpus_per_rank * experiment.mesh.ranks_per_node,
        }

    def collect(self, store: Store, name: str, tasks: Sequence[Task]) -> Collected:  # noqa: ARG002 (protocol)
        """Return the records of earlier submissions that nobody has collected, and what is on its way."""
        slurm.require_slurm()
        with _reachable():
            return self._collect(store, tasks)

    def _collect(self, store: Store, tasks: Sequence[Task]) -> Collected:
        claimed = [(task, claimant(store, task.trial_id)) for task in tasks]
        known = {each: read_submission(store, each) for each in {claim for _, claim in claimed if claim}}
        records: dict[str, Record] = {}
        flights = []
        for task, submission in claimed:
            earlier = known.get(submission or "")
            if submission is None or earlier is None or earlier.launcher != self.launcher:
                continue
            record = record_for(store, task.trial_id, submission)
            if record is not None:
                release(store, task.trial_id, submission)
                records[task.trial_id] = record
                continue
            job = _job_of(store, task, earlier)
            if job is not None:
                flights.append(Flight(task=task, submission=submission, job=job))
        for each in known.values():
            if each is not None and each.launcher == self.launcher and not each.is_submitted:
                unnoted = set(slurm.find(each.job_name)) - set(each.jobs.values())
                slurm.cancel(unnoted, pending_only=True)  # its driver died while submitting
        return Collected(records=records, flights=flights)

    def dispatch(self, sweep: Sweep, tasks: Sequence[Task], flights: Sequence[Flight]) -> Run:
        """Submit `tasks` and return the run that follows them, and `flights`, to their records."""
        refusals: list[Record] = []
        new: list[Flight] = []
        if tasks and not sweep.interrupts.is_asked:
            with _reachable():
                submission = new_submission(self.launcher, now())
                free, new = claim_free(sweep.store, submission, tasks)
                if free:
                    new += self._hand_over(sweep, submission, free, refusals)
        return self._run(sweep, refusals, [*new, *flights])

    @abstractmethod
    def batches(self, tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
        """Return what is submitted together."""

    @abstractmethod
    def submit(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> list[str]:
        """Submit one batch; return the job id of each trial.

        Raises:
            SubmissionError: sbatch refuses it.
        """

    def request(self, submission: Submission, **resources: Any) -> Request:
        """Return what is asked of sbatch: what all jobs ask for, and `resources`."""
        return Request(
            name=submission.job_name,
            time_min=self.time_min,
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            signal_delay_s=self.signal_delay_s,
            requeue=self.requeue,
            setup=self.setup,
            python=self.python,
            additional_parameters=self.additional_parameters or {},
            **resources,
        )

    def _hand_over(
        self, sweep: Sweep, submission: Submission, tasks: Sequence[Task], refusals: list[Record]
    ) -> list[Flight]:
        store = sweep.store
        jobs: dict[str, str] = {}
        refused: list[tuple[Task, SubmissionError]] = []
        for group in self.batches(tasks):
            try:
                found = self.submit(sweep, submission, group)
            except SubmissionError as error:
                refused += [(task, error) for task in group]
                continue
            jobs |= dict(zip((task.trial_id for task in group), found, strict=True))
            write_submission(store, replace(submission, jobs=jobs))
        write_submission(store, replace(submission, jobs=jobs, is_submitted=True))
        for task, _ in refused:
            release(store, task.trial_id, submission.id)
        if not jobs:
            raise refused[0][1]
        for task, refusal in refused:
            refusals.append(refuse_task(task, str(refusal), store=store, name=sweep.name))
        ids = sorted({job.partition("_")[0] for job in jobs.values()}, key=int)
        sys.stderr.write(f"submitted {len(jobs)} points as Slurm jobs {', '.join(ids)}\n")
        return [
            Flight(task=task, submission=submission.id, job=jobs[task.trial_id])
            for task in tasks
            if task.trial_id in jobs
        ]

    def _run(self, sweep: Sweep, refusals: Sequence[Record], flights: Sequence[Flight]) -> Iterator[Record]:
        yield from refusals
        if self.wait:
            yield from self.follow(sweep, flights)

    def follow(self, sweep: Sweep, flights: Sequence[Flight]) -> Iterator[Record]:
        """Yield the records of trials that jobs carry, as they arrive."""
        look = _Look(sweep=sweep, time_min=self.time_min)
        for record in arrivals(sweep, flights, look.ends):
            if record is not None:
                yield record
                continue
            if sweep.interrupts.is_asked and not look.is_stopping:
                look.is_stopping = True
                self.stop(sweep, flights)
            time.sleep(self.poll_s)

    def stop(self, sweep: Sweep, flights: Sequence[Flight]) -> None:
        """Let jobs that wait never begin, and running lanes end after their trials."""
        slurm.cancel({flight.job for flight in flights if flight.job}, pending_only=True)
        for submission in {flight.submission for flight in flights}:
            (folder_of(sweep.store, submission) / STOP).touch()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm(OnSlurm):
    """One array a shape, one element a trial; Slurm decides when and where each of them runs.

    Fields:
        gpus_per_node: GPUs that an element asks for on each node; `None` is one a rank where the partition
            has GPUs and the mesh does not say `device=cpu`.
        array_parallelism: elements of an array that run at once.
    """

    launcher: ClassVar[str] = "slurm"

    gpus_per_node: int | None = None
    array_parallelism: int = 256

    def batches(self, tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
        """Return the trials by shape."""
        return list(by_shape((task.shape, task) for task in tasks).values())

    def submit(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> list[str]:
        """Submit one array."""
        shape = tasks[0].shape
        folder = folder_of(sweep.store, submission.id).absolute()
        cores = self.cpus_per_rank * shape.ranks_per_node
        for task in tasks:
            spec = LaneSpec(
                name=task.trial_id,
                launcher=self.launcher,
                submission=submission.id,
                root=sweep.store.root.absolute(),
                sweep=sweep.name,
                tasks=(task,),
                seat=Seat(core_count=cores),
                isolation="forkserver",
                sys_path=absolute_sys_path(),
            )
            spec.write()
        calls = [Call(function=run_element, args=(str(folder), task.trial_id)) for task in tasks]
        request = self.request(
            submission,
            nodes=shape.nodes,
            cpus_per_task=cores,
            gpus_per_node=self._gpus(shape),
            array_parallelism=self.array_parallelism,
        )
        return submit(calls, request, folder / "jobs")

    def _gpus(self, shape: Shape) -> int:
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if shape.device == "cpu" or slurm.cluster_gpus(self.partition) == 0:
            return 0
        return shape.ranks_per_node


@dataclass(kw_only=True, slots=True)
class _Look:
    """Looks for jobs that have ended without a record.

    Fields:
        sweep: whose trials they carry.
        time_min: the time limit, for messages.
        is_stopping: the sweep was interrupted; what is cancelled now is no failure.
    """

    sweep: Sweep
    time_min: int
    is_stopping: bool = False
    _over_since_s: dict[str, float] = field(default_factory=dict)
    _is_unreachable: bool = False

    def ends(self, flights: Sequence[Flight]) -> dict[str, End | None]:
        """Return the flights that will never have a record."""
        try:
            found = self._ends(flights)
        except slurm.SlurmUnreachableError as error:
            if not self._is_unreachable:
                sys.stderr.write(f"acbench: {error}; waiting for it\n")
            self._is_unreachable = True
            return {}
        self._is_unreachable = False
        return found

    def _ends(self, flights: Sequence[Flight]) -> dict[str, End | None]:
        states = slurm.states({flight.job for flight in flights if flight.job is not None})
        found: dict[str, End | None] = {}
        for flight in flights:
            end = self._end(flight, states)
            if end is None:
                self._over_since_s.pop(flight.task.trial_id, None)
            elif self._is_settled(flight):
                found[flight.task.trial_id] = None if self._was_stopped(flight, end) else end
        slurm.cancel(
            {
                flight.job
                for flight in flights
                if flight.task.trial_id in found
                and flight.job is not None
                and _is_idle(states.get(flight.job))
            }
        )
        return found

    def _end(self, flight: Flight, states: Mapping[str, slurm.JobState]) -> End | None:
        state = states.get(flight.job or "")
        if state is None:
            return End(status="lost", kind="unknown", message=_unknown(flight))
        if state.is_stuck:
            return End(
                status="lost", kind="LAUNCH_FAILED", message=f"Slurm could not start job {state.job} again"
            )
        if not state.is_over:
            return self._end_of_node(flight, state)
        return end_of(state, self.time_min)

    def _end_of_node(self, flight: Flight, state: slurm.JobState) -> End | None:
        """Return the end of a job that Slurm has put back into its queue because a node failed under it.

        Until nothing of its last start is left, its lane may still say that it was preempted.
        """
        attempt = read_attempt(self.sweep.store, flight.task.trial_id, flight.submission)
        if attempt is None or attempt.yielded or state.restarts <= attempt.restarts:
            return None
        if state.state == "COMPLETING":
            return None
        where = ", ".join(attempt.hosts)
        return End(status="lost", kind="NODE_FAIL", message=f"a node of job {flight.job} failed ({where})")

    def _is_settled(self, flight: Flight) -> bool:
        """Whether the end was first seen long enough ago; listing the folder makes NFS look again."""
        list(self.sweep.store.trial_dir(flight.task.trial_id).iterdir())
        first_s = self._over_since_s.setdefault(flight.task.trial_id, time.monotonic())
        return time.monotonic() - first_s >= _SETTLE_S

    def _was_stopped(self, flight: Flight, end: End) -> bool:
        """Whether the trial never began because the user stopped the sweep."""
        has_begun = read_attempt(self.sweep.store, flight.task.trial_id, flight.submission) is not None
        return self.is_stopping and not has_begun and end.kind in {"CANCELLED", "COMPLETED"}


@contextmanager
def _reachable() -> Iterator[None]:
    """Refuse to plan without Slurm; later on, it is waited for.

    Raises:
        ConfigError: it does not answer.
    """
    try:
        yield
    except slurm.SlurmUnreachableError as error:
        raise ConfigError("hydra/launcher", f"Slurm does not answer: {error}") from error


def _unknown(flight: Flight) -> str:
    """Slurm forgets an element at once that is cancelled before it starts, and any job after minutes."""
    return f"Slurm no longer knows job {flight.job}: it was cancelled before it started, or ended long ago"


def end_of(state: slurm.JobState, time_min: int) -> End:
    """Return what a job's end means for a trial that it left without a record."""
    job = f"job {state.job}"
    match state.state:
        case "TIMEOUT" | "DEADLINE":
            message = f"{job} was ended at its time limit of {time_min} min"
            return End(status="timeout", kind=state.state, message=message)
        case "OUT_OF_MEMORY":
            return End(
                status="oom", kind=state.state, message=f"{job} was ended by the kernel's memory limit"
            )
        case "CANCELLED":
            return End(status="lost", kind=state.state, message=f"{job} was cancelled")
        case "NODE_FAIL" | "BOOT_FAIL":
            return End(status="lost", kind=state.state, message=f"a node of {job} failed")
        case "PREEMPTED":
            return End(status="lost", kind=state.state, message=f"{job} was preempted and not requeued")
    how = f"signal {state.signal}" if state.signal else f"status {state.exit_code}"
    return End(
        status="lost", kind=state.state, message=f"{job} ended with {how} before the trial left a record"
    )


def claim_free(
    store: Store, submission: Submission, tasks: Sequence[Task]
) -> tuple[list[Task], list[Flight]]:
    """Write down a new submission and claim `tasks` for it; return those, and those that jobs have begun."""
    write_submission(store, submission)
    free, begun = [], []
    for task in tasks:
        attempt = claim_unless_begun(store, task.trial_id, submission)
        if attempt is None:
            free.append(task)
        else:
            begun.append(Flight(task=task, submission=attempt.submission, job=attempt.job))
    return free, begun


def _is_idle(state: slurm.JobState | None) -> bool:
    """Whether Slurm keeps a job whose trial is over: an array's element carries that trial alone."""
    return state is not None and (state.is_stuck or ("_" in state.job and not state.is_over))


def absolute_sys_path() -> tuple[str, ...]:
    """Return where Python finds modules, valid in any working directory."""
    return tuple(str(Path(each).absolute()) for each in sys.path)


def _job_of(store: Store, task: Task, submission: Submission) -> str | None:
    """Return the job of a claimed trial; `None` where its driver died before there was one."""
    if task.trial_id in submission.jobs:
        return submission.jobs[task.trial_id]
    attempt = read_attempt(store, task.trial_id, submission.id)
    return None if attempt is None else attempt.job
