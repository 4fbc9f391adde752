"""The agent supervises the local ranks of one trial at a time.

It starts them from a fork server that has imported torch, gives them a place to meet, and when one fails
or time runs out gives the others a moment to write what they know, ends them, and names the culprit.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export it to type checkers

from harness.culprit import Deadline, Death, Outcome, decide, is_waiting, lost
from harness.errors import Terminated
from harness.forkserver import ForkServer, ForkServerError
from harness.rank_report import RankReport, log_path, read_reports, report_path
from harness.ranks import STACK_SIGNAL, RankStart, Rendezvous

Watch = Callable[[Mapping[int, RankReport]], None]

PRELOAD = (
    "harness.ranks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_WATCH_S = 0.25
_GRACE_S = 0.5
_TERMINATE_S = 1.0
_KILL_S = 5.0
_STACK_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """The ranks of one trial on this node.

    Fields:
        trial_dir: folder for logs and reports; created when missing.
        entry: `package.module:function`, called in every rank as `entry(payload, context)`.
        payload: anything that pickles.
        ranks: local ranks, >= 1.
        world_size: ranks of the whole trial; `ranks` when `None`.
        node_rank: this node holds ranks `node_rank * ranks` and following.
        rendezvous: host and port of the store that node 0 hosts; `None` on one node, where a file does.
        deadline_s: seconds from the start of the ranks to their last result.
        device: `cpu` or `cuda`.
        backend: of the process group; `None`: gloo on cpu and nccl on cuda where there is more than one
            rank, no group where there is one.
        threads_per_rank: of intra-operator parallelism.
    """

    trial_dir: Path
    entry: str
    payload: Any
    ranks: int
    deadline_s: float
    world_size: int | None = None
    node_rank: int = 0
    rendezvous: tuple[str, int] | None = None
    device: str = "cpu"
    backend: str | None = None
    threads_per_rank: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"RankJob.ranks: must be at least 1, got {self.ranks}")
        if self.total % self.ranks:
            raise ValueError(
                f"RankJob.world_size: must be a multiple of the {self.ranks} local ranks, got {self.total}"
            )
        if self.total > self.ranks and self.rendezvous is None:
            raise ValueError(
                "RankJob.rendezvous: several nodes need an address that all of them know, got None"
            )

    @property
    def total(self) -> int:
        """Ranks of the whole trial."""
        return self.ranks if self.world_size is None else self.world_size

    @property
    def local(self) -> range:
        """The ranks on this node."""
        return range(self.node_rank * self.ranks, (self.node_rank + 1) * self.ranks)

    @property
    def group_backend(self) -> str | None:
        """The backend of the process group; `None`: no group."""
        if self.backend is None and self.total > 1:
            return "nccl" if self.device == "cuda" else "gloo"
        return self.backend


class Agent:
    """Runs trials, one after the other, in fresh processes; a context manager.

    The fork server starts with the first trial (it imports for seconds; later trials cost a fork), so
    the environment must be final by then. Leaving the context ends it and whatever is still alive.

    Args:
        preload: modules to import in the fork server besides torch's own; they must not touch CUDA.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = (*PRELOAD, *preload)
        self._server: ForkServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, job: RankJob, watch: Watch | None = None) -> Outcome:
        """Run the ranks of `job` to their end and return how they ended.

        Whatever leaves this method, a result or an exception (Ctrl-C), no rank is alive afterwards.

        Args:
            watch: called four times a second with the reports so far, to draw progress.

        Raises:
            ForkServerError: the fork server could not import `preload`.
        """
        if self._server is None:
            self._server = ForkServer(self._preload)
        _clear(job)
        try:
            return self._supervise(self._server, job, watch)
        except ForkServerError as error:
            self.close()  # the next trial starts another one
            return lost(f"{error}; its ranks were killed with it")

    def close(self) -> None:
        """End the fork server."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _supervise(self, server: ForkServer, job: RankJob, watch: Watch | None) -> Outcome:
        crew = _Crew(server, job)
        with _rendezvous(job) as rendezvous, contextlib.ExitStack() as undo:
            # an interrupted wait may have swallowed a message: only a new server is in a known state
            undo.callback(self.close)
            crew.start(rendezvous)
            deadline = crew.follow(watch)
            undo.pop_all()
        return decide(job.local, deaths=crew.deaths, reports=_reports(job), deadline=deadline)


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Turn SIGTERM into `Terminated(143)` inside the block, so that it unwinds like Ctrl-C does."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Crew:
    """The live ranks of one job."""

    def __init__(self, server: ForkServer, job: RankJob) -> None:
        self.deaths: list[Death] = []
        self._server = server
        self._job = job
        self._live: dict[int, int] = {}  # process id -> rank

    def start(self, rendezvous: Rendezvous | None) -> None:
        job = self._job
        payload = pickle.dumps(job.payload)
        for local_rank, rank in enumerate(job.local):
            start = RankStart(
                trial_dir=job.trial_dir,
                entry=job.entry,
                payload=payload,
                rank=rank,
                local_rank=local_rank,
                world_size=job.total,
                device=job.device,
                backend=job.group_backend,
                rendezvous=rendezvous,
                timeout_s=job.deadline_s,
                threads=job.threads_per_rank,
            )
            self._live[self._server.start("harness.ranks:main", start)] = rank

    def follow(self, watch: Watch | None) -> Deadline | None:
        """Wait until no rank is alive; return the deadline if that is what ended the trial."""
        end_s = time.monotonic() + self._job.deadline_s
        while self._live and (left_s := end_s - time.monotonic()) > 0:
            death = self._await_death(left_s if watch is None else min(left_s, _WATCH_S))
            if death is not None and not self._has_result(death.rank):
                self._await_all(_GRACE_S)
                self._end()
            if watch is not None:
                watch(_reports(self._job))
        if not self._live:
            return None
        deadline = Deadline(seconds=self._job.deadline_s, time=time.time(), waiting=self._waiting())
        self._end()
        return deadline

    def _has_result(self, rank: int) -> bool:
        """Whether `rank` has left a result; how its process ends after that says nothing."""
        report = _reports(self._job).get(rank)
        return report is not None and report.state == "ok"

    def _waiting(self) -> frozenset[int]:
        """Have the live ranks write their stacks to their logs; return those that wait in a collective."""
        self._signal_all(STACK_SIGNAL)
        self._await_all(_GRACE_S, ended=True)  # one that has not installed its handler yet dies of it
        folder = self._job.trial_dir
        return frozenset(
            rank for rank in self._live.values() if is_waiting(_read_end(log_path(folder, rank)))
        )

    def _end(self) -> None:
        for number, patience_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
            self._signal_all(number)
            self._await_all(patience_s, ended=True)
        if self._live:
            raise ForkServerError(f"ranks {sorted(self._live.values())} survived SIGKILL for {_KILL_S:g} s")

    def _signal_all(self, number: int) -> None:
        for pid in self._live:
            self._server.signal(pid, number)

    def _await_all(self, patience_s: float, *, ended: bool = False) -> None:
        end_s = time.monotonic() + patience_s
        while self._live and (left_s := end_s - time.monotonic()) > 0:
            self._await_death(left_s, ended=ended)

    def _await_death(self, timeout_s: float, *, ended: bool = False) -> Death | None:
        died = self._server.next_death(timeout_s)
        if died is None:
            return None
        death = Death(rank=self._live.pop(died.pid), code=died.code, time=died.time, ended=ended)
        self.deaths.append(death)
        return death


def _clear(job: RankJob) -> None:
    """Remove what an earlier run of these ranks left in the folder."""
    job.trial_dir.mkdir(parents=True, exist_ok=True)
    for rank in job.local:
        report_path(job.trial_dir, rank).unlink(missing_ok=True)


def _reports(job: RankJob) -> dict[int, RankReport]:
    """Return the reports of this trial; an earlier one in the folder may have had more ranks."""
    reports = read_reports(job.trial_dir)
    return {rank: report for rank, report in reports.items() if rank < job.total}


@contextlib.contextmanager
def _rendezvous(job: RankJob) -> Iterator[Rendezvous | None]:
    """Provide the place where the ranks of `job` meet for as long as they live.

    On one node that is a file: torch's TCP store asks the name server for the name of every client,
    `::ffff:127.0.0.1`, and a name server that does not answer costs 5 s a trial.
    """
    if job.group_backend is None:
        yield None
    elif job.rendezvous is None:
        with tempfile.TemporaryDirectory(prefix="acbench-") as folder:
            yield Path(folder, "rendezvous")
    elif job.node_rank > 0:
        yield job.rendezvous
    else:
        store = TCPStore(*job.rendezvous, is_master=True, wait_for_workers=False)
        yield job.rendezvous
        del store


def _read_end(path: Path) -> str:
    """Return the last part of a log, where a stack that was just written stands."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _STACK_BYTES, 0))
        return file.read().decode("utf-8", errors="replace")
