"""Trials on this machine: one after the other under one agent, or several at once in lanes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import ConfigError, require_at_least
from harness.experiment.devices import cuda_count, device_type
from harness.experiment.mesh import Mesh
from harness.launchers.base import InFlight, Sweep, follow_packer
from harness.launchers.driven import Driven
from harness.launchers.lane_spec import COMMAND, LaneSpec
from harness.launchers.packing import Need, Packer, Packing, Pool, Slice
from harness.launchers.resource_shape import Resources, by_shape
from harness.launchers.run_task import run_task, unusable_task
from harness.launchers.task import Task
from harness.ranks.agent import Agent
from harness.ranks.rank_report import RankReport
from harness.records.claims import Submission, claimant, release
from harness.records.files import new_file
from harness.records.record import Record
from harness.records.store import Store

RANKS_PER_CORE = 8
_HERE = "localhost"
_LOCK_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Driven):
    """Runs trials on this machine.

    Fields:
        max_parallel: trials at once, >= 1. Trials on CUDA get disjoint devices, and the cores that belong to
            them; trials on the CPU disjoint cores, `cores / max_parallel` each and at least one a rank.
        share_cores: let trials share all cores; step times then depend on what else runs.
    """

    max_parallel: int = 1
    share_cores: bool = False

    def __post_init__(self) -> None:
        require_at_least("hydra.launcher.max_parallel", self.max_parallel, 1)

    @property
    def uses_agent(self) -> bool:
        """True if trials run one after the other; several at once run in lanes."""
        return self.max_parallel == 1

    def check(self, mesh: Mesh) -> None:
        """Refuse several nodes, more ranks than devices, and far more ranks than cores."""
        if mesh.nodes > 1:
            problem = f"this launcher runs on one node, got {mesh.nodes}"
            raise ConfigError("mesh.nodes", f"{problem}; use hydra/launcher=slurm")
        if device_type(mesh) == "cuda":
            devices = cuda_count()
            if devices == 0:
                problem = "cuda was asked for, but this torch sees no CUDA device"
                raise ConfigError("mesh.device", f"{problem}; use cpu")
            if mesh.ranks_per_node > devices:
                problem = f"{mesh.label} needs {mesh.ranks_per_node} CUDA devices a node"
                raise ConfigError("mesh", f"{problem}, found {devices}")
            return
        if mesh.cp_method == "torch":
            problem = "torch has no rules for kernels of the CPU, and torch sees no CUDA device here"
            raise ConfigError("mesh.cp_method", f"{problem}; use gather, ring or ulysses")
        most = RANKS_PER_CORE * len(_cores())
        if mesh.ranks_per_node > most:
            raise ConfigError(
                "mesh",
                f"{mesh.label} needs {mesh.ranks_per_node} ranks on this node, at most {most} fit its cores "
                f"({RANKS_PER_CORE} a core); use a smaller mesh",
            )

    def place(self, mesh: Mesh) -> dict[str, Any]:
        """Return the cores that a trial will have."""
        count = self._core_count(mesh)
        return {"cpus": f"{count}, shared" if self.share_cores else count}

    def run_tasks(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> Iterator[Record]:
        """Run trials one after the other in this process, or in lanes."""
        run = self._one_by_one if self.uses_agent else self._packed
        return run(sweep, submission.id, tasks)

    def _one_by_one(self, sweep: Sweep, submission: str, tasks: Sequence[Task]) -> Iterator[Record]:
        """Yield the record of each trial after it ran in this process, on all cores."""
        resources = Resources(core_count=len(_cores()))
        job = {"launcher": "local", "submission": submission}
        with sweep.agent as agent:
            for task in tasks:
                record = _hold_and_run(sweep, task, agent, resources, job)
                if sweep.interrupts.stop_requested and record is None:
                    return
                if record is not None:
                    yield record

    def _packed(self, sweep: Sweep, submission: str, tasks: Sequence[Task]) -> Iterator[Record]:
        """Yield the records of trials as their lanes finish them."""
        shapes = by_shape((task.shape, task) for task in tasks)
        packing = Packing(
            launcher="local",
            submission=submission,
            store=Store(sweep.store.root.absolute()),
            sweep=sweep.name,
            needs={shape: self._need(group[0].experiment.mesh) for shape, group in shapes.items()},
            most=self.max_parallel,
            start=_start,
            resources=self._resources,
            driver_pid=os.getpid(),
        )
        pool = Pool([_HERE], gpus=_devices(), cores=_cores())
        flights = [InFlight(task=task, submission=submission, job=None) for task in tasks]
        with Packer(packing=packing, tasks=shapes, pool=pool) as packer:
            yield from follow_packer(sweep, packer, flights)

    def _need(self, mesh: Mesh) -> Need:
        """Return what a lane takes of this machine: a GPU for each rank; no cores where they are shared."""
        gpus = mesh.ranks_per_node if device_type(mesh) == "cuda" else 0
        return Need(nodes=1, gpus=gpus, cores=0 if self.share_cores else self._core_count(mesh))

    def _resources(self, slice_: Slice) -> Resources:
        """Return what a trial may use; it is pinned to the cores of its slice unless cores are shared."""
        cores = slice_.cores[_HERE]
        if self.share_cores:
            return Resources(core_count=self._share())
        return Resources(core_count=len(cores), cores=cores)

    def _core_count(self, mesh: Mesh) -> int:
        """Return how many cores a trial has.

        All where trials run one after the other. Otherwise its share; on CUDA by its part of the devices, on
        the CPU at least one a rank.
        """
        cores = len(_cores())
        if self.max_parallel == 1:
            return cores
        if self.share_cores:
            return self._share()
        if device_type(mesh) == "cuda":
            return max(1, cores * mesh.ranks_per_node // len(_devices()))
        return min(cores, max(self._share(), mesh.ranks_per_node))

    def _share(self) -> int:
        """Return the cores of one of `max_parallel` trials, at least 1."""
        return max(1, len(_cores()) // self.max_parallel)


def _hold_and_run(
    sweep: Sweep, task: Task, agent: Agent, resources: Resources, job: dict[str, Any]
) -> Record | None:
    """Run a trial as soon as nobody else does.

    `None`: the sweep was interrupted before, or a later command has taken the trial over.
    """
    is_waiting = False
    while not sweep.interrupts.stop_requested:
        try:
            with sweep.store.locked(task.trial_id) as is_free:
                if is_free:
                    is_ours = claimant(sweep.store, task.trial_id) == job["submission"]
                    return _run(sweep, task, agent, resources, job) if is_ours else None
        except OSError as error:
            record = unusable_task(task, error, name=sweep.name)
            sweep.progress.point_finished(task.label, record.status, record.verdict)
            return record
        if not is_waiting:
            sweep.progress.point_waits(task.label)
            is_waiting = True
        time.sleep(_LOCK_POLL_S)
    return None


def _run(sweep: Sweep, task: Task, agent: Agent, resources: Resources, job: dict[str, Any]) -> Record:
    """Run a trial whose lock is held, show its progress, and return its record.

    Args:
        job: launcher and submission, for `environment.job` of the record.
    """
    sweep.progress.point_started(task.label)

    def watch(reports: Mapping[int, RankReport]) -> None:
        """Show the steps of rank 0, which are those of every rank."""
        if 0 in reports and reports[0].total:
            sweep.progress.steps(reports[0].done, reports[0].total)

    record = run_task(
        task,
        lambda ranks: agent.run(ranks, watch=watch if sweep.progress.is_live else None),
        call=agent.call,
        store=sweep.store,
        name=sweep.name,
        resources=resources,
        job=job,
    )
    release(sweep.store, task.trial_id, job["submission"])
    sweep.progress.point_finished(task.label, record.status, record.verdict)
    return record


def _start(spec: LaneSpec, slice_: Slice) -> subprocess.Popen[bytes]:
    """Start the process of a lane on this machine, which sees the devices of its slice only."""
    environment = dict(os.environ)
    gpus = slice_.gpus[_HERE]
    if gpus:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [visible[gpu] if len(visible) > gpu and visible[gpu] else str(gpu) for gpu in gpus]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    with new_file(spec.folder / f"lane-{spec.name}.log", within=spec.root) as log:
        return subprocess.Popen(  # noqa: S603 (our own program)
            [*COMMAND, str(spec.write())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C on the terminal reaches the driver only
        )


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def _devices() -> list[int]:
    """Return the indices of the CUDA devices, as `CUDA_VISIBLE_DEVICES` leaves them."""
    return list(range(cuda_count()))
