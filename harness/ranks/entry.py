"""The program of a rank process: from a bare fork to a result on disk.

A rank writes its log and its report, nothing else; it neither draws nor uploads. It leaves by
`os._exit`, because torch aborts in up to half of all orderly exits after a gloo group was used.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed does not export them to type checkers
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from harness.ranks.forkserver import flush_streams
from harness.ranks.network_interface import LOOPBACK, VARIABLE, use_interface_to
from harness.ranks.rank_report import PHASES, RankReport, keep, kept_path, log_path
from harness.ranks.start import STACK_SIGNAL, RankStart, Rendezvous
from harness.records.files import new_file, remove
from strategies.last_words import last_words

_HEARTBEAT_S = 0.2
_LEAVE_S = 5.0
_MEET_POLL_S = 0.002
_TRACEBACK_CHARS = 8000


class RankContext:
    """The rank, as its entry sees it."""

    def __init__(self, start: RankStart) -> None:
        self.rank = start.rank
        self.local_rank = start.local_rank
        self.world_size = start.job.total
        self.trial_dir = start.job.trial_dir
        self.device = (
            torch.device("cuda", start.local_rank) if start.job.device == "cuda" else torch.device("cpu")
        )
        self._phase = PHASES[0]
        self._written_s = 0.0
        self._is_ok = False
        self._pid = os.getpid()

    @property
    def is_ok(self) -> bool:
        """True if the result is on disk."""
        return self._is_ok

    def phase(self, name: str) -> None:
        """Report that the rank enters a phase. Raises ValueError: `name` is not one of `PHASES`."""
        if name not in PHASES:
            raise ValueError(f"phase: must be one of {', '.join(PHASES)}, got {name!r}")
        self._phase = name
        self._write("running")

    def progress(self, done: int, total: int) -> None:
        """Report steps of the phase; writes at most five times a second, and the last step always."""
        if done == total or time.monotonic() - self._written_s >= _HEARTBEAT_S:
            self._write("running", done=done, total=total)

    def keep(self, measured: dict[str, Any]) -> None:
        """Write what has been measured so far: it stays if the trial's time is over before its end.

        Raises:
            TypeError: `measured` is not made of JSON values.
        """
        keep(self.trial_dir, self.rank, measured)

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result. Raises TypeError: `result` is not made of JSON values."""
        self._write("ok", result=result)
        remove(kept_path(self.trial_dir, self.rank), within=self.trial_dir.parent)
        self._is_ok = True

    def __enter__(self) -> Self:
        self._write("started")
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Turn whatever ended the entry into a report; this is the boundary of the trial.

        An error that cannot be written (no space, no descriptor, no folder) goes on to the fork server.
        """
        if error is None:
            return False
        self._require_own_process()
        words = last_words(error)
        try:
            self._write(
                "error", kind=words.kind, message=words.message, traceback=words.traceback[-_TRACEBACK_CHARS:]
            )
        except OSError:
            return False
        with contextlib.suppress(Exception):  # the user's code may have closed or replaced it
            sys.stderr.write(words.traceback)
        return True

    def _write(self, state: str, **fields: Any) -> None:
        self._require_own_process()
        self._written_s = time.monotonic()
        RankReport(rank=self.rank, state=state, phase=self._phase, time=time.time(), **fields).write(
            self.trial_dir
        )

    def _require_own_process(self) -> None:
        """Leave where the model has forked this process, which runs on as if it were the rank."""
        if os.getpid() != self._pid:
            os._exit(1)


def main(start: RankStart) -> NoReturn:
    """Run one rank and leave: status 0 with a result on disk, 1 with the error on disk."""
    job = start.job
    _redirect(log_path(job.trial_dir, start.rank))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the driver decides
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(STACK_SIGNAL, file=sys.stderr)
    store: Store | None = None
    with RankContext(start) as context:
        os.environ.update(
            RANK=str(start.rank), LOCAL_RANK=str(start.local_rank), WORLD_SIZE=str(start.job.total)
        )
        if start.job.cores is not None:
            # first: threads are born where their maker may run
            os.sched_setaffinity(0, start.job.cores)
        torch.set_num_threads(start.job.threads_per_rank)
        if start.job.device == "cuda":
            torch.cuda.set_device(start.local_rank)
        store = _join(start)
        module, _, function = job.entry.partition(":")
        entry = getattr(importlib.import_module(module), function)
        context.finish(entry(pickle.loads(job.payload), context))  # noqa: S301 (from our driver)
    flush_streams()
    if context.is_ok and store is not None:
        _await_results(store, context.world_size)
    os._exit(0 if context.is_ok else 1)


def _redirect(log: Path) -> None:
    """Send what Python and C++ print to `log`, line by line."""
    with new_file(log, within=log.parents[1]) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 (a descriptor; lives as long as the process)
        for number in (1, 2)
    )


def _join(start: RankStart) -> Store | None:
    """Create the process group over the agent's store."""
    job, backend = start.job, start.job.group_backend
    if backend is None or job.rendezvous is None:
        return None
    timeout = timedelta(seconds=job.deadline_s)  # the agent is always first
    store = _meeting_place(job.rendezvous, job.total)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=start.rank,
        world_size=job.total,
        timeout=timeout,
        device_id=torch.device("cuda", start.local_rank) if backend == "nccl" else None,
    )
    return store


def _meeting_place(rendezvous: Rendezvous, world_size: int) -> Store:
    """Return the store at which ranks meet: a file on one node, TCP between several."""
    if isinstance(rendezvous, Path):
        os.environ.setdefault(VARIABLE, LOOPBACK)  # a host name without an address blocks gloo
        return FileStore(str(rendezvous), world_size)
    host, port = rendezvous
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    use_interface_to(host)
    return TCPStore(host, port, world_size, is_master=False)


def _await_results(store: Store, world_size: int) -> None:
    """Wait until every rank has its result: none may see a connection close in its last collective.

    The wait is short, because a rank that failed never comes.
    """
    end_s = time.monotonic() + _LEAVE_S
    with contextlib.suppress(dist.DistError):  # a peer failed or the agent is gone: our result stands
        store.add("finished", 1)
        while store.add("finished", 0) < world_size and time.monotonic() < end_s:
            time.sleep(_MEET_POLL_S)
