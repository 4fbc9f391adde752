"""A lane: a process on every node of a slice of resources, which runs trials of one shape, one at a time.

`main` is what a job or step of a scheduler or a second process on this machine starts. Node 0 takes a trial
that is claimed for its submission, not held by another lane and not attempted before, runs it, and leaves its
record.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeAlias

from harness.launchers.lane_spec import STOP, TERMINATED_STATUS, TIME_LIMIT_STATUS, LaneSpec
from harness.launchers.run_task import PRELOAD, lost_task, now, rank_job, run_task
from harness.launchers.slurm_client import hosts
from harness.launchers.task import Task
from harness.ranks.agent import Agent
from harness.ranks.culprit import Outcome
from harness.ranks.forkserver import die_with
from harness.ranks.lane_board import BoardLostError, hosting
from harness.ranks.network_interface import cluster_address
from harness.ranks.node_report import Halt
from harness.ranks.nodes import Director, JobWords, follow, join
from harness.ranks.start import RankJob
from harness.records.claims import (
    Attempt,
    Trouble,
    claimant,
    read_attempt,
    record_for,
    write_attempt,
    write_trouble,
)
from harness.records.files import read_private
from harness.records.record import Failure
from harness.records.store import Store
from harness.trial.trial_plan import BASELINES, TrialPlan

RunRanks: TypeAlias = Callable[[RankJob], Outcome]
Lost: TypeAlias = Callable[[], Collection[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """The place of a lane's process: host, devices, job.

    Fields:
        hosts: hosts of the lane, node 0 first.
        job: id of the scheduler's job, `None` without a scheduler.
        restarts: how often the scheduler has started this job before.
    """

    node_rank: int
    hosts: tuple[str, ...]
    job: str | None
    restarts: int

    @classmethod
    def alone(cls) -> Location:
        """Return the place of a lane that only this machine knows of."""
        return cls(node_rank=0, hosts=(os.uname().nodename,), job=None, restarts=0)

    @classmethod
    def here(cls) -> Location:
        """Return the place that Slurm's environment describes."""
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
        array, index = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
        return cls(
            node_rank=int(os.environ["SLURM_NODEID"]),
            hosts=hosts(nodes),
            job=os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{index}",
            restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )


class _Yielded(Exception):  # noqa: N818 (the lane was told to go; nothing is wrong)
    """The lane was ended from outside while its trial ran."""


class Halts:
    """Turns the signals of a scheduler into a reason to end the ranks.

    SIGUSR2 says that the time limit is near, SIGTERM that the lane must go now. Both reach every process of a
    step, so that ranks may die of SIGTERM before the lane has read it: `halt` is asked again after they have.
    """

    def __init__(self) -> None:
        self._halt: Halt | None = None

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's affair
        return self

    def __exit__(self, *_error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # nothing is left to be ended

    def halt(self) -> Halt | None:
        """Return why to stop now."""
        return self._halt

    @property
    def is_terminated(self) -> bool:
        """True if the lane must go now."""
        return self._halt is not None and self._halt.kind == "terminated"

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Note why the lane is to end; SIGTERM outweighs a time limit."""
        if number == signal.SIGTERM:
            self._halt = Halt(kind="terminated", message="the lane was told to end", error_kind="SIGTERM")
        elif self._halt is None:
            self._halt = Halt(
                kind="time_limit", message="the time limit of the job was reached", error_kind="timeout"
            )


def run_lane(spec: LaneSpec, location: Location) -> int:
    """Run the trials of a lane on this node; return the exit status of its process.

    0: no trial is left; `TIME_LIMIT_STATUS`: time is over; `TERMINATED_STATUS`: told to go; 1: another node
    of the lane is lost.
    """
    address = spec.folder / f"lane-{spec.name}-{location.restarts}.address"
    with Halts() as halts, Agent(PRELOAD) as agent:
        if location.node_rank > 0:
            return _follow(agent, location.node_rank, spec, address, halts)
        with _ranks_run(agent, location, halts, address) as (run, lost):
            lane = _Lane(spec=spec, location=location, halts=halts, run_ranks=run, lost=lost, call=agent.call)
            lane.run()
        return _status(halts) or int(bool(lost()))


def main() -> None:
    """Run the lane whose spec the command line names."""
    spec = _read_spec(Path(sys.argv[1]))
    if spec.driver_pid is not None:
        die_with(spec.driver_pid, signal.SIGTERM)  # nobody would collect what this lane does
    is_local = spec.launcher == "local"  # perhaps inside an allocation that it does not know of
    sys.exit(run_lane(spec, Location.alone() if is_local else Location.here()))


def job_meant(spec: LaneSpec, words: JobWords) -> RankJob:
    """Return the job that node 0 has announced; a node has it from its own copy of the spec.

    Raises:
        ValueError: the spec has no such trial.
    """
    tasks = {task.trial_id: task for task in spec.tasks}
    trial, baseline = words.get("trial"), words.get("baseline")
    if trial not in tasks or baseline not in BASELINES:
        raise ValueError(f"lane {spec.name}: no trial {trial!r} with baseline {baseline!r}")
    plan = TrialPlan(experiment=tasks[trial].experiment, baseline=baseline)
    return rank_job(plan, Store(spec.root).trial_dir(trial), spec.resources)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lane:
    """Node 0's part of a lane.

    Fields:
        run_ranks: runs the ranks of a trial to their end.
        lost: returns the nodes that follow no longer; a lane without them ends, so that another may take its
            trials.
        call: calls a function where torch is imported.
    """

    spec: LaneSpec
    location: Location
    halts: Halts
    run_ranks: RunRanks
    lost: Lost
    call: Callable[..., Any]

    def run(self) -> None:
        """Run the lane's trials that nobody else holds, until none is left or the lane must stop."""
        store = Store(self.spec.root)
        for task in self.spec.tasks:
            if self.halts.halt() is not None or (self.spec.folder / STOP).exists() or self.lost():
                return
            try:
                with store.locked(task.trial_id) as is_held:
                    if is_held:
                        self._take(store, task)
            except OSError as error:  # one folder that cannot be used does not end the lane
                trouble = Trouble(kind=type(error).__name__, message=str(error))
                write_trouble(store, task.trial_id, self.spec.submission, trouble)

    def _take(self, store: Store, task: Task) -> None:
        """Run a trial whose lock is held, unless it is taken over, recorded, or was begun before."""
        spec = self.spec
        if claimant(store, task.trial_id) != spec.submission:
            return  # a later command has taken it over
        if record_for(store, task.trial_id, spec.submission) is not None:
            return
        earlier = read_attempt(store, task.trial_id, spec.submission)
        if earlier is not None and not earlier.yielded:
            lost_task(
                task, _died_before(earlier, self.location), store=store, name=spec.sweep, job=self._job()
            )
            return
        attempt = Attempt(
            submission=spec.submission,
            lane=spec.name,
            job=self.location.job,
            restarts=self.location.restarts,
            hosts=self.location.hosts,
            started_at=now(),
        )
        write_attempt(store, task.trial_id, attempt)
        try:
            run_task(
                task,
                self._supervise,
                call=self.call,
                store=store,
                name=spec.sweep,
                resources=spec.resources,
                job=self._job(),
            )
        except _Yielded:
            write_attempt(store, task.trial_id, replace(attempt, yielded=True))

    def _supervise(self, job: RankJob) -> Outcome:
        """Run ranks to their end; a trial that was cut off because the lane must go leaves no record."""
        outcome = self.run_ranks(job)
        if self.halts.is_terminated and outcome.status != "ok":
            raise _Yielded
        return outcome

    def _job(self) -> dict[str, Any]:
        """Return what `environment.job` of a record says."""
        return {
            "launcher": self.spec.launcher,
            "submission": self.spec.submission,
            "lane": self.spec.name,
            "id": self.location.job,
            "restarts": self.location.restarts,
            "hosts": list(self.location.hosts),
        }


def _died_before(attempt: Attempt, location: Location) -> Failure:
    where = ", ".join(attempt.hosts)
    return Failure(
        kind="NODE_FAIL" if location.restarts > attempt.restarts else "lost",
        message=f"the agent on {where} ended while the trial ran, and left no report",
    )


@contextmanager
def _ranks_run(
    agent: Agent, location: Location, halts: Halts, address: Path
) -> Iterator[tuple[RunRanks, Lost]]:
    """Provide what runs ranks to their end, on one node or on all, and what tells the lost nodes."""
    if len(location.hosts) == 1:
        yield partial(agent.run, halt=halts.halt), tuple
        return
    with hosting(cluster_address(location.hosts), address) as board:
        director = Director(agent, location.hosts, halts.halt, board)

        def run(job: RankJob) -> Outcome:
            return director.run(job, {"trial": job.trial_dir.name, "baseline": job.payload.baseline})

        yield run, lambda: director.lost
        director.close()


def _follow(agent: Agent, node_rank: int, spec: LaneSpec, address: Path, halts: Halts) -> int:
    """Run this node's share of the lane's trials; return the exit status of its process."""
    try:
        board = join(address, halts.halt)
        if board is not None:
            with closing(board):
                follow(agent, node_rank, board, halts.halt, partial(job_meant, spec))
    except BoardLostError as error:
        sys.stderr.write(f"node 0 of the lane is gone: {error}\n")
        return 1
    return _status(halts)


def _status(halts: Halts) -> int:
    halt = halts.halt()
    if halt is None:
        return 0
    return TERMINATED_STATUS if halts.is_terminated else TIME_LIMIT_STATUS


def _read_spec(path: Path) -> LaneSpec:
    """Return a lane's spec, and let this process find the user's modules."""
    spec = pickle.loads(read_private(path))  # noqa: S301 (nobody else can have written it)
    assert isinstance(spec, LaneSpec)
    sys.path[:] = spec.sys_path
    return spec
