"""Rank processes that live on: one trial after another, each with a process group of its own.

A worker takes a next trial only where the last one left it as it was before its first (`process_state`).
Whatever else happens, it ends as the process of a rank always ends, and the next trial gets a new one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

from harness.ranks import entry as ranks
from harness.ranks.entry import Ended, RankStart
from harness.ranks.forkserver import Died, ForkServer, ForkServerError
from harness.ranks.process_state import ProcessState

_END_S = 5.0
_MAIN = f"{ranks.__name__}:{ranks.main.__name__}"


@dataclass(frozen=True, slots=True)
class _Finished:
    """The trial has ended well and the worker awaits the next, since `time` in seconds of `time.time`."""

    time: float


@dataclass(frozen=True, slots=True)
class _Taken:
    """The worker has the start: from now on its death is the trial's."""


@dataclass(kw_only=True, slots=True)
class _Worker:
    """A rank process as the driver sees it.

    Fields:
        first: what it was started with; fixes its device, its threads and its cores.
        channel: to its process; closed when only its death can end its trial.
        is_busy: it has a trial whose end has not been told yet.
    """

    pid: int
    first: RankStart
    channel: Connection
    is_busy: bool = True

    def fits(self, start: RankStart) -> bool:
        """Whether a trial finds in this process what it would find in a new one."""
        return all(
            getattr(self.first, name) == getattr(start, name) for name in ("device", "threads", "cores")
        )

    def takes(self, start: RankStart) -> bool:
        """Hand it a trial, `False` when its process is gone."""
        try:
            self.channel.send(start)
            self.channel.recv()
        except (EOFError, OSError):
            return False
        self.is_busy = True
        return True


class PersistentServer:
    """A fork server of ranks that is used as `ForkServer` is, and whose ranks may outlive their trial.

    `next_death` returns the end of a trial, which with status 0 need not be that of the process. At most one
    idle worker stands for a local rank, because an idle one holds memory of its device.

    Args:
        preload: modules that every rank shall find imported.

    Raises:
        ForkServerError: an import failed; the server's traceback is on stderr.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._server = ForkServer((*preload, __name__))  # what ours imports is no trace of a trial
        self._ends: deque[Died] = deque()
        self._workers: dict[int, _Worker] = {}  # by process id

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._server.pid

    def start(self, target: str, argument: RankStart) -> int:
        """Give a rank to the idle worker of its local rank, or to a new one; return the process id.

        Raises:
            ForkServerError: the fork server has ended.
            ValueError: `target` is something else than `harness.ranks.entry:main`.
        """
        if target != _MAIN:
            raise ValueError(f"PersistentServer.start: target must be {_MAIN!r}, got {target!r}")
        self._bury()
        for worker in [each for each in self._workers.values() if not each.is_busy]:
            if worker.first.local_rank != argument.local_rank:
                continue
            if worker.fits(argument) and worker.takes(argument):
                return worker.pid
            self._dismiss(worker)
        return self._fork(argument)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank that `next_death` has not returned yet; its process ends with its trial."""
        worker = self._workers.get(pid)
        if worker is not None and worker.is_busy:
            worker.channel.close()
            self._server.signal(pid, number)

    def next_death(self, timeout_s: float) -> Died | None:
        """Return the next end of a rank's trial, `None` when there is none within `timeout_s`.

        Raises:
            ForkServerError: the server has ended.
        """
        end_s = time.monotonic() + timeout_s
        self._bury()  # what the server knows already would not wake us
        while not self._ends:
            heard = {each.channel: each for each in self._workers.values() if self._may_finish(each)}
            ready = wait([self._server.fileno(), *heard], max(end_s - time.monotonic(), 0))
            if not ready:
                return None
            for channel in heard.keys() & ready:
                self._hear(heard[channel])
            self._bury()
        return self._ends.popleft()

    def close(self) -> None:
        """End the server and every worker."""
        for worker in self._workers.values():
            worker.channel.close()
        self._workers.clear()
        self._server.close()

    def _fork(self, start: RankStart) -> int:
        ours, theirs = Pipe()
        with theirs:
            pid = self._server.start(f"{__name__}:{serve.__name__}", start, theirs)
        self._workers[pid] = _Worker(pid=pid, first=start, channel=ours)
        return pid

    @staticmethod
    def _may_finish(worker: _Worker) -> bool:
        return worker.is_busy and not worker.channel.closed

    def _hear(self, worker: _Worker) -> None:
        try:
            finished: _Finished = worker.channel.recv()
        except (EOFError, OSError):  # it is dying: the server will tell
            worker.channel.close()
            return
        worker.is_busy = False
        self._ends.append(Died(worker.pid, 0, finished.time))

    def _bury(self, timeout_s: float = 0.0) -> None:
        """Note the deaths that the server has to tell; that of an idle worker concerns no trial."""
        while (died := self._server.next_death(timeout_s)) is not None:
            timeout_s = 0.0
            worker = self._workers.pop(died.pid)
            worker.channel.close()
            if worker.is_busy:
                self._ends.append(died)

    def _dismiss(self, worker: _Worker) -> None:
        """End an idle worker and wait for it: its device shall be free."""
        end_s = time.monotonic() + _END_S
        self._server.signal(worker.pid, signal.SIGKILL)
        while worker.pid in self._workers:
            if time.monotonic() > end_s:
                raise ForkServerError(f"worker {worker.pid} survived SIGKILL for {_END_S:g} s")
            self._bury(end_s - time.monotonic())


def serve(start: RankStart, driver: Connection) -> NoReturn:
    """Run one trial after another until one leaves a trace, or the driver wants no more."""
    before = ProcessState()
    while (ended := _run(start)).is_quiet:
        traces = before.restore()
        if traces:
            sys.stderr.write(f"this rank's process ends with its trial, which changed {', '.join(traces)}\n")
            break
        try:
            driver.send(_Finished(time.time()))
            start = driver.recv()
            driver.send(_Taken())
        except (EOFError, OSError):
            break
    ranks.flush()
    os._exit(0 if ended.is_ok else 1)


def _run(start: RankStart) -> Ended:
    with warnings.catch_warnings():  # what is shown once is shown once a trial
        return ranks.run(start)
