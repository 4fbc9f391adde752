"""Many trials in one allocation: every lane is a step on devices of its own, and runs trial after trial."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness import slurm
from harness.attempts import now
from harness.claims import Submission, folder_of, new_submission
from harness.errors import ConfigError, require_at_least, require_one_of
from harness.lane import COMMAND, LaneSpec
from harness.launchers.base import Flight, Run, Sweep, follow_packer
from harness.launchers.local import ISOLATIONS
from harness.launchers.slurm import OnSlurm, absolute_sys_path, claim_free
from harness.packing import Need, Packer, Packing, Pool, Slice
from harness.record import Record
from harness.shapes import Seat, Shape, by_shape
from harness.store import Store
from harness.submission import Call, submit
from harness.task import Task

_LOAD = "load.pickle"
_TICK_S = 0.1
_OF_THE_BATCH_STEP = (
    "SLURM_CPU_BIND",
    "SLURM_MEM_",
    "SLURM_NTASKS",
    "SLURM_GPUS_",
    "SLURM_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
)
"""Beginnings of variables that srun would read as options of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmPacked(OnSlurm):
    """One job for the whole sweep; inside an allocation, the allocation that is there.

    Fields:
        nodes: of the allocation; `None` is what the largest shape needs.
        gpus_per_node: of the allocation; `None` is all that a node of the partition has.
        cpus_per_node: of the allocation; `None` is all that a node of the partition has.
        max_parallel: lanes at once; `None` is as many as devices and cores allow. Each of them holds some
            0.5 GiB of host memory.
        isolation: of ranks, as for `hydra/launcher=local`.
    """

    launcher: ClassVar[str] = "slurm_packed"

    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    max_parallel: int | None = None
    isolation: str = "forkserver"

    def __post_init__(self) -> None:
        # slots=True makes a new class, so a bare super() would look at the one it replaced
        OnSlurm.__post_init__(self)
        if self.max_parallel is not None:
            require_at_least("hydra.launcher.max_parallel", self.max_parallel, 1)
        require_one_of("hydra.launcher.isolation", self.isolation, ISOLATIONS)

    def dispatch(self, sweep: Sweep, tasks: Sequence[Task], flights: Sequence[Flight]) -> Run:
        """Submit `tasks` as one job, or, inside an allocation, claim them for steps of it."""
        if "SLURM_JOB_ID" not in os.environ:
            return OnSlurm.dispatch(self, sweep, tasks, flights)
        submission = new_submission(self.launcher, now())
        free, begun = claim_free(sweep.store, submission, tasks)
        load = self._load(sweep, submission, _Allocation.here(), free)
        return self._run_here(sweep, load, [*begun, *flights])

    def batches(self, tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
        """Return all trials as one batch."""
        return [tasks]

    def submit(self, sweep: Sweep, submission: Submission, tasks: Sequence[Task]) -> list[str]:
        """Submit the job that packs all trials."""
        allocation = _Allocation(
            hosts=(),
            nodes=self.nodes or max(task.shape.nodes for task in tasks),
            gpus=slurm.cluster_gpus(self.partition) if self.gpus_per_node is None else self.gpus_per_node,
            cores=self.cpus_per_node or slurm.cores_a_node(self.partition),
        )
        load = self._load(sweep, submission, allocation, tasks)
        folder = folder_of(sweep.store, submission.id).absolute()
        (folder / _LOAD).write_bytes(pickle.dumps(load))
        request = self.request(
            submission,
            nodes=allocation.nodes,
            cpus_per_task=allocation.cores,
            gpus_per_node=allocation.gpus,
            use_srun=False,  # the packer runs on the first node, and starts the steps itself
        )
        (job,) = submit([Call(function=run_packer, args=(str(folder),))], request, folder / "jobs")
        return [job] * len(tasks)

    def _load(
        self, sweep: Sweep, submission: Submission, allocation: _Allocation, tasks: Sequence[Task]
    ) -> _Load:
        shapes = by_shape((task.shape, task) for task in tasks)
        needs = {shape: self._need(shape, allocation) for shape in shapes}
        return _Load(
            store=Store(sweep.store.root.absolute()),
            sweep=sweep.name,
            submission=submission,
            tasks=shapes,
            needs=needs,
            allocation=allocation,
            most=self.max_parallel or allocation.nodes * allocation.cores,
            isolation=self.isolation,
            sys_path=absolute_sys_path(),
        )

    def _need(self, shape: Shape, allocation: _Allocation) -> Need:
        """Return what a lane takes of the allocation.

        Raises:
            ConfigError: more than there is.
        """
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
                raise ConfigError(
                    f"hydra.launcher.{option}", f"a trial of shape {shape.label} needs {asked}, got {there}"
                )
        return need

    def _run_here(self, sweep: Sweep, load: _Load, flights: Sequence[Flight]) -> Iterator[Record]:
        new = [
            Flight(task=task, submission=load.submission.id, job=os.environ["SLURM_JOB_ID"])
            for tasks in load.tasks.values()
            for task in tasks
        ]
        with load.packer() as packer:
            yield from follow_packer(sweep, packer, new)
        yield from self.follow(sweep, flights)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allocation:
    """What a job has of the cluster.

    Fields:
        hosts: their names; empty before the job runs.
        nodes: how many.
        gpus, cores: of each of them.
    """

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
    """What a packer is told; it pickles."""

    store: Store
    sweep: str
    submission: Submission
    tasks: Mapping[Shape, Sequence[Task]]
    needs: Mapping[Shape, Need]
    allocation: _Allocation
    most: int
    isolation: str
    sys_path: tuple[str, ...]

    def packer(self) -> Packer:
        """Return what packs the trials into the allocation that this process is in."""
        allocation = self.allocation
        packing = Packing(
            launcher=SlurmPacked.launcher,
            submission=self.submission.id,
            store=self.store,
            sweep=self.sweep,
            needs=self.needs,
            most=self.most,
            start=_start,
            seat=lambda slice_: Seat(core_count=len(next(iter(slice_.cores.values())))),
            isolation=self.isolation,
        )
        names = allocation.hosts or slurm.hosts(os.environ["SLURM_JOB_NODELIST"])
        pool = Pool(names, gpus=range(allocation.gpus), cores=range(allocation.cores))
        return Packer(packing=packing, tasks=self.tasks, pool=pool)


def run_packer(folder: str) -> None:
    """Pack the trials of a submission into the allocation of this job, to the last.

    Args:
        folder: of the submission.
    """
    load = pickle.loads((Path(folder) / _LOAD).read_bytes())  # noqa: S301 (from our driver)
    assert isinstance(load, _Load)
    sys.path[:] = load.sys_path
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the lanes are told too, and end; then so does this
    with load.packer() as packer:
        packer.bury_earlier(int(os.environ.get("SLURM_RESTART_COUNT", "0")))
        while not packer.is_over():
            time.sleep(_TICK_S)


def _start(spec: LaneSpec, slice_: Slice) -> subprocess.Popen[bytes]:
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
        "--kill-on-bad-exit=0",
        "--unbuffered",
        f"--output={log}",
        *COMMAND,
        str(spec.write()),
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_OF_THE_BATCH_STEP)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)  # noqa: S603 (our own program)
