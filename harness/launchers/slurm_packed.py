"""Many trials in one allocation: every lane is a step on devices of its own, and runs trial after trial."""

from __future__ import annotations

import functools
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from harness.errors import ConfigError, require_at_least
from harness.experiment.mesh import Mesh
from harness.launchers import slurm_client as slurm
from harness.launchers import slurm_submit
from harness.launchers.base import Collected, InFlight, Run, Sweep, follow_packer
from harness.launchers.driven import Driven
from harness.launchers.lane_spec import COMMAND, PROGRAM, LaneSpec
from harness.launchers.packing import Need, Packer, Packing, Pool, Slice
from harness.launchers.resource_shape import Resources, Shape, by_shape, shape_of
from harness.launchers.slurm import OnSlurm, absolute_sys_path
from harness.launchers.task import Task
from harness.records.claims import Submission, folder_of
from harness.records.files import read_private, write_atomically
from harness.records.record import Record
from harness.records.store import Store

_LOAD = "load.pickle"
_PROGRAM = (
    "-c",
    "import sys; from harness.launchers.slurm_packed import run_packer; run_packer(sys.argv[1])",
)
"""Words that make Python the packer of a job; the folder of the submission follows."""

_TICK_S = 0.1
_OF_THE_BATCH_STEP = (
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_EXCLUSIVE",
    "SLURM_GPUS",
    "SLURM_GPU_",
    "SLURM_GRES",
    "SLURM_MEM_",
    "SLURM_NTASKS",
    "SLURM_TRES_PER_TASK",
)
"""Beginnings of variables that srun would read as options of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmPacked(OnSlurm):
    """One job for the whole sweep.

    Inside an allocation (salloc, sbatch) its trials are steps of that one, and the driver stays with them:
    what says how a job is submitted (`wait`, `time_min`, `setup`, `requeue`, ...) then has no effect.
    `gpus_per_node` of `None` is all that a node of the partition has.

    Fields:
        nodes: number of nodes of the allocation; `None` is what the largest shape needs.
        cpus_per_node: CPUs on each node of the allocation; `None` is all that a node of the partition has.
        max_parallel: lanes at once; `None` is as many as devices and cores allow. Each of them holds some
            0.5 GiB of host memory.
    """

    launcher: ClassVar[str] = "slurm_packed"

    nodes: int | None = None
    cpus_per_node: int | None = None
    max_parallel: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers below 1."""
        # slots=True makes a new class, so a bare super() would look at the one it replaced
        OnSlurm.__post_init__(self)
        lowest = {"nodes": 1, "cpus_per_node": 1, "max_parallel": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None:
                require_at_least(f"hydra.launcher.{name}", value, low)

    def check(self, mesh: Mesh) -> None:
        """Refuse more than was asked for; what the cluster itself does not have is refused at submission."""
        shape = shape_of(mesh)
        if _is_inside():
            self._need(shape, _Allocation.here())
            return
        asked = _Allocation(
            hosts=(),
            nodes=self.nodes or shape.nodes,
            gpus=shape.ranks_per_node if self.gpus_per_node is None else self.gpus_per_node,
            cores=self.cpus_per_node or self.cpus_per_rank * shape.ranks_per_node,
        )
        self._need(shape, asked)

    def collect(self, store: Store, name: str, tasks: Sequence[Task]) -> Collected:
        """Return what earlier jobs came to; inside an allocation, what other drivers run."""
        if _is_inside():
            return _Inside(settings=self).collect(store, name, tasks)
        return OnSlurm.collect(self, store, name, tasks)

    def dispatch(self, sweep: Sweep, tasks: Sequence[Task], flights: Sequence[InFlight]) -> Run:
        """Submit `tasks` as one job, or, inside an allocation, run them as steps of it."""
        if _is_inside():
            return _Inside(settings=self).dispatch(sweep, tasks, flights)
        return OnSlurm.dispatch(self, sweep, tasks, flights)

    def batches(self, tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
        """Return all trials that fit the allocation, and by shape those that do not."""
        allocation = self._allocation(tasks)
        fitting, others = [], []
        for group in by_shape((task.shape, task) for task in tasks).values():
            try:
                self._need(group[0].shape, allocation)
            except ConfigError:
                others.append(group)
            else:
                fitting += group
        return [fitting, *others] if fitting else others

    def submit(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> list[str]:
        """Submit the job that packs all trials."""
        load = self.load(sweep, submission, self._allocation(tasks), tasks)
        folder = folder_of(sweep.store, submission.id).absolute()
        write_atomically(folder / _LOAD, pickle.dumps(load), within=sweep.store.root.absolute())
        request = self.request(
            submission,
            nodes=load.allocation.nodes,
            cpus_per_task=load.allocation.cores,
            gpus_per_node=load.allocation.gpus,
            use_srun=False,  # the packer runs on the first node, and starts the steps itself
        )
        words = (*_PROGRAM, str(folder))
        (job,) = slurm_submit.submit([slurm_submit.JobCall(words)], request, folder / "jobs")
        return [job] * len(tasks)

    def load(
        self, sweep: Sweep, submission: Submission, allocation: _Allocation, tasks: Sequence[Task]
    ) -> _Load:
        """Return what a packer needs to know. Raises ConfigError: a shape does not fit the allocation."""
        shapes = by_shape((task.shape, task) for task in tasks)
        packing = Packing(
            launcher=self.launcher,
            submission=submission.id,
            store=Store(sweep.store.root.absolute()),
            sweep=sweep.name,
            needs={shape: self._need(shape, allocation) for shape in shapes},
            most=self.max_parallel or allocation.nodes * allocation.cores,
            start=functools.partial(_start, self.python),
            resources=_resources,
        )
        return _Load(packing=packing, tasks=shapes, allocation=allocation, sys_path=absolute_sys_path())

    def _allocation(self, tasks: Sequence[Task]) -> _Allocation:
        return _Allocation(
            hosts=(),
            nodes=self.nodes or max(task.shape.nodes for task in tasks),
            gpus=slurm.cluster_gpus(self.partition) if self.gpus_per_node is None else self.gpus_per_node,
            cores=self.cpus_per_node or slurm.cores_a_node(self.partition),
        )

    def _need(self, shape: Shape, allocation: _Allocation) -> Need:
        """Return what a lane takes of the allocation. Raises ConfigError: more than there is."""
        uses_gpus = allocation.gpus > 0 and shape.device != "cpu"
        need = Need(
            nodes=shape.nodes,
            gpus=shape.ranks_per_node if uses_gpus else 0,
            cores=self.cpus_per_rank * shape.ranks_per_node,
        )
        limits = {
            "nodes": (need.nodes, allocation.nodes),
            "gpus_per_node": (need.gpus, allocation.gpus),
            "cpus_per_node": (need.cores, allocation.cores),
        }
        for option, (asked, there) in limits.items():
            if asked > there:
                problem = f"a trial of shape {shape.label} needs {asked}"
                raise ConfigError(f"hydra.launcher.{option}", f"{problem}, got {there}")
        return need


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inside(Driven):
    """Runs trials as steps of the allocation that the driver is in."""

    settings: SlurmPacked

    def run_tasks(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> Iterator[Record]:
        """Pack `tasks` into the allocation."""
        if not tasks:
            return
        load = self.settings.load(sweep, submission, _Allocation.here(), tasks)
        flights = [InFlight(task=task, submission=submission.id, job=None) for task in tasks]
        with load.packer() as packer:
            yield from follow_packer(sweep, packer, flights)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allocation:
    """The part of the cluster that a job has. `hosts`: their names; empty before the job runs."""

    hosts: tuple[str, ...]
    nodes: int
    gpus: int
    cores: int

    @classmethod
    def here(cls) -> _Allocation:
        """Return the allocation that this process is in, as its first node describes it."""
        names = slurm.hosts(os.environ["SLURM_JOB_NODELIST"])
        return cls(
            hosts=names,
            nodes=len(names),
            gpus=int(os.environ.get("SLURM_GPUS_ON_NODE", "0")),
            cores=int(os.environ["SLURM_CPUS_ON_NODE"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """The instructions that a packer gets; they pickle.

    Fields:
        packing: what its lanes share; the number of earlier starts is known in the job only.
        sys_path: where Python finds the user's modules.
    """

    packing: Packing
    tasks: Mapping[Shape, Sequence[Task]]
    allocation: _Allocation
    sys_path: tuple[str, ...]

    def packer(self) -> Packer:
        """Return what packs the trials into the allocation that this process is in."""
        names = self.allocation.hosts or slurm.hosts(os.environ["SLURM_JOB_NODELIST"])
        pool = Pool(names, gpus=range(self.allocation.gpus), cores=range(self.allocation.cores))
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return Packer(packing=replace(self.packing, restarts=restarts), tasks=self.tasks, pool=pool)


def run_packer(folder: str) -> None:
    """Pack the trials of a submission into the allocation of this job, to the last."""
    load = pickle.loads(read_private(Path(folder) / _LOAD))  # noqa: S301 (nobody else can have written it)
    assert isinstance(load, _Load)
    sys.path[:] = load.sys_path
    with load.packer() as packer:
        # the lanes are told too, and end; then so does this
        signal.signal(signal.SIGTERM, lambda _number, _frame: packer.end_soon())
        packer.record_earlier_deaths()
        while not packer.advance():
            time.sleep(_TICK_S)


def _resources(slice_: Slice) -> Resources:
    return Resources(core_count=len(next(iter(slice_.cores.values()))))


def _is_inside() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _start(python: str | None, spec: LaneSpec, slice_: Slice) -> subprocess.Popen[bytes]:
    """Start a step of one process a node, on resources that no other step of the job has."""
    count, first = len(slice_.hosts), slice_.hosts[0]
    gpus = len(slice_.gpus[first])
    log = spec.folder / f"lane-{spec.name}.log"
    command = [
        "srun",
        "--exact",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(slice_.hosts)}",
        f"--cpus-per-task={len(slice_.cores[first])}",
        f"--gpus-per-node={gpus}" if gpus else "--gres=none",
        "--mem=0",  # of what the job has; a step that asked for memory would keep the others waiting
        *slurm_submit.NODES_END_TOGETHER,
        "--unbuffered",
        f"--output={log}",
        *(COMMAND[:1] if python is None else shlex.split(python)),
        *PROGRAM,
        str(spec.write()),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_OF_THE_BATCH_STEP)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 (our own program)
