"""The agent supervises the ranks of one trial at a time on its node.

It starts them from a fork server that has imported torch, and provides their rendezvous. When a rank fails,
time is over or the caller halts the trial, it gives the ranks a moment to write their reports and ends them.
On one node the agent also names the culprit. On several nodes each agent reports, and node 0 decides.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from harness.errors import Terminated
from harness.ranks.assistant import Assistant, AssistantEndedError, LateAnswerError
from harness.ranks.culprit import Outcome, decide_nodes
from harness.ranks.forkserver import ForkServer, ForkServerError
from harness.ranks.live_ranks import HaltCheck, LiveRanks, Watch, late_halt
from harness.ranks.node_report import Halt, NodeReport
from harness.ranks.rank_report import forget, read_reports
from harness.ranks.start import RankJob, RankStart, Rendezvous
from harness.records.files import make_folder

PRELOAD = ("harness.ranks.entry",)


class Agent:
    """Runs trials, one after the other; a context manager.

    The fork server starts with the first call or trial: it imports for seconds, and later trials cost a fork.
    The environment must be final by then. Leaving the context ends it and whatever is still
    alive; a trial after that starts another one.

    Args:
        preload: modules to import in the fork server besides torch's own; they must not touch CUDA.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = (*PRELOAD, *preload)
        self._server: ForkServer | None = None
        self._assistant: Assistant | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def call(self, target: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Return what a function returns in a fork of the fork server; see `Assistant.call`.

        One process answers all calls until the next trial begins, or it has ended.

        A fork server that somebody has ended is started again, once.

        Raises:
            AssistantEndedError: the function has ended its process.
            LateAnswerError: the function has not returned in time.
            ForkServerError: the fork server could not import `preload`, or has ended again.
        """
        try:
            return self._called(target, *arguments, deadline_s=deadline_s)
        except (AssistantEndedError, LateAnswerError):
            raise
        except ForkServerError:
            return self._called(target, *arguments, deadline_s=deadline_s)

    def _called(self, target: str, *arguments: Any, deadline_s: float | None) -> Any:
        """Return what a function returns; after an error the next call or trial starts another server."""
        try:
            if self._assistant is None:
                self._assistant = Assistant(self._ready_server())
            return self._assistant.call(target, *arguments, deadline_s=deadline_s)
        except ForkServerError:
            self.close()
            raise

    def run(self, job: RankJob, watch: Watch | None = None, halt: HaltCheck | None = None) -> Outcome:
        """Run the ranks of a `job` on one node to their end and return how they ended; see `supervise`.

        Raises:
            ValueError: `job` is on several nodes, where one report decides nothing.
        """
        if job.nodes > 1:
            raise ValueError(f"Agent.run: decides about one node, got a job on {job.nodes}; use supervise")
        report = self.supervise(job, watch, halt)
        return decide_nodes(
            job.total,
            node_reports={report.node_rank: report},
            rank_reports=read_reports(job.trial_dir),
            hosts=(report.host,),
        )

    def supervise(
        self, job: RankJob, watch: Watch | None = None, halt: HaltCheck | None = None
    ) -> NodeReport:
        """Run this node's ranks of `job` to their end and return how they ended.

        No rank is alive when this returns or raises (Ctrl-C).

        Args:
            watch: called at least four times a second with the reports so far, to draw progress.
            halt: called as often; returns why the ranks must end now, or `None`. It is not called while the
                agent deals with a failure, for 8 s at most.

        Raises:
            ForkServerError: the fork server could not import `preload`.
            ValueError: `job` is on several nodes that do not know where to meet.
        """
        if job.nodes > 1 and job.rendezvous is None:
            problem = "RankJob.rendezvous: several nodes need an address that all of them know"
            raise ValueError(f"{problem}, got None")
        server = self._ready_server()
        assistant, self._assistant = self._assistant, None
        if assistant is not None:
            assistant.close()
        make_folder(job.trial_dir, within=job.trial_dir.parent)
        for rank in job.local:
            forget(job.trial_dir, rank)
        halt = halt or (lambda: None)
        live = LiveRanks(server, job.trial_dir, job.total)
        try:
            found = self._follow(live, job, watch, halt)
        except ForkServerError as error:  # the next trial starts another one
            found = late_halt(halt) or Halt(
                kind="terminated", message=f"{error}; its ranks were killed with it"
            )
        return NodeReport(
            node_rank=job.node_rank,
            host=socket.gethostname(),
            time=live.ended_s,
            deaths=tuple(live.deaths),
            halt=found,
            waiting=tuple(live.waiting),
            places=tuple(live.places),
        )

    def close(self) -> None:
        """End the fork server."""
        server, self._server, self._assistant = self._server, None, None
        if server is not None:
            server.close()

    def _ready_server(self) -> ForkServer:
        """Return the fork server, started where there is none; one that fails is closed."""
        if self._server is None:
            self._server = ForkServer(self._preload)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._server.await_ready()
            undo.pop_all()
        return self._server

    def _follow(self, live: LiveRanks, job: RankJob, watch: Watch | None, halt: HaltCheck) -> Halt | None:
        """Start the ranks of a job and follow them to their end.

        Return why they were halted, if they were.
        """
        with _rendezvous(job) as rendezvous, contextlib.ExitStack() as undo:
            # an interrupted wait may have swallowed a message: only a new server is in a known state
            undo.callback(self.close)
            told = replace(job, payload=pickle.dumps(job.payload), rendezvous=rendezvous)
            live.start([RankStart(job=told, local_rank=index) for index in range(job.ranks)])
            found = live.follow(job.deadline_s, watch, halt)
            undo.pop_all()
        return found


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


@contextlib.contextmanager
def _rendezvous(job: RankJob) -> Iterator[Rendezvous | None]:
    """Provide the place where the ranks of `job` meet for as long as they live.

    On one node that is a file, which needs no name server (see `nodes.hosted`).
    """
    if job.group_backend is None:
        yield None
    elif job.rendezvous is not None:
        yield job.rendezvous
    else:
        with tempfile.TemporaryDirectory(prefix="acbench-") as folder:
            yield Path(folder, "rendezvous")
