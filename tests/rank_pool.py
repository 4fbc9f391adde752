"""Standing ranks for tests: a function sent to all of them costs milliseconds instead of a launch.

    def sum_of_ranks(rank: int) -> int: ...            # at module level: ranks import it
    assert pool2.run(sum_of_ranks) == [1, 1]

The process group (gloo, met over a file) is up before the first call. A call may use it and create
further groups, and must seed what it draws; it must leave torch's global settings as they were, which is
checked. After any failure the ranks are replaced, because nobody knows where their collectives stand.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.ranks.culprit import is_communication
from harness.ranks.forkserver import ForkServer
from strategies.budget.planning import block_options

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # optimizers import it
    "scipy.optimize",
    "tests.parity.cases",
    "tests.rank_pool",
)
"""What calls import; it is imported once for all ranks, and no collection of garbage looks at it."""
_GRACE_S = 1.0
_COLLECTIVE_S = 300.0
"""A rank may plan, while the others wait for it, on a machine that is busy with something else."""


class RankFailedError(RuntimeError):
    """A rank of the pool died, hung, or raised what cannot be sent."""


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a rank of the pool is told at its start."""

    rank: int
    world_size: int
    folder: Path


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException
    text: str


class RankPool:
    """`world_size` standing ranks on one fork server; they start with the first call."""

    def __init__(self, server: ForkServer, world_size: int) -> None:
        self.world_size = world_size
        self._server = server
        self._ranks: dict[Connection, int] = {}
        self._pids: list[int] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 240.0, **keywords: Any
    ) -> list[Any]:
        """Call `function(rank, *arguments, **keywords)` on every rank; return the results by rank.

        Raises:
            RankFailedError: a rank died or did not return within `timeout_s`.
            Exception: what a rank raised, the first that is not the echo of another's, with its traceback.
        """
        if not self._ranks:
            self._start()
        call = pickle.dumps((function, arguments, keywords))
        for connection in self._ranks:
            connection.send_bytes(call)
        replies = self._collect(time.monotonic() + timeout_s)
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, _Failure)}
        if failures or len(replies) < self.world_size:
            self.close()
        if failures:
            raise _first(failures)
        missing = sorted(set(range(self.world_size)) - set(replies))
        if missing:
            raise RankFailedError(f"{_name(function)}: ranks {missing} did not return within {timeout_s:g} s")
        return [replies[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the ranks; the next call starts others."""
        for connection in self._ranks:
            connection.close()
        self._ranks.clear()
        for pid in self._pids:
            self._server.signal(pid, signal.SIGKILL)
        self._pids.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        # kept until the ranks end: every new process group meets over a file in it
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        with Listener(str(folder / "pool"), backlog=self.world_size) as listener:
            for rank in range(self.world_size):
                start = _Standing(rank, self.world_size, folder)
                self._pids.append(self._server.start("tests.rank_pool:serve", start))
            connections = [listener.accept() for _ in range(self.world_size)]
        self._ranks = {connection: connection.recv() for connection in connections}

    def _collect(self, end_s: float) -> dict[int, Any]:
        """Return the replies by rank; a failure or a death leaves the others a moment only."""
        replies: dict[int, Any] = {}
        waiting = dict(self._ranks)
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            for connection in wait(list(waiting), left_s):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    replies[rank] = _Failure(RankFailedError(f"rank {rank} died"), "no traceback")
                if isinstance(replies[rank], _Failure):
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
        return replies


def serve(start: _Standing) -> None:
    """Be a rank of a pool until the pool closes the connection."""
    torch.set_num_threads(1)
    keep_options()
    seed_no_absent_device()
    collect_rarely()
    share_one_device()
    store = dist.FileStore(str(start.folder / "store"), start.world_size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=_COLLECTIVE_S)
    dist.init_process_group(
        "gloo", store=store, rank=start.rank, world_size=start.world_size, timeout=timeout
    )
    dist.barrier()
    with Client(str(start.folder / "pool")) as pool:
        pool.send(start.rank)
        while True:
            try:
                call = pool.recv_bytes()
            except (EOFError, ConnectionError):
                os._exit(0)
            pool.send_bytes(_reply(start.rank, call))
            gc.collect()
            gc.freeze()  # what calls import and keep is out of the collections of the next


def keep_options() -> None:
    """Search the options of equal blocks once for all calls; by itself a process keeps those of a few."""
    vars(block_options)["_all"] = lru_cache(maxsize=None)(block_options._all.__wrapped__)


def seed_no_absent_device() -> None:
    """Seed the devices that are there: torch keeps each other seed with the text of the whole stack."""
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            vars(devices)["manual_seed_all"] = lambda _seed: None


def share_one_device() -> None:
    """Let gloo wait for sockets in one thread for all groups: each such thread wakes 100 times a second.

    Groups of calls stay as long as the rank, and idle ranks took up to a third of the CPU time of all tests.
    """
    make, device = dist.ProcessGroupGloo.__init__, dist.ProcessGroupGloo.create_device(interface="lo")

    def made(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [device], 2, timeout
        make(self, store, rank, size, options)

    vars(dist)["ProcessGroupGloo"].__init__ = made


def collect_rarely() -> None:
    """Let many objects be made between two collections of garbage: else a twentieth of a plan's time."""
    gc.set_threshold(10_000, 20, 20)


def _reply(rank: int, call: bytes) -> bytes:
    before = _global_settings()
    try:
        function, arguments, keywords = pickle.loads(call)
        result = function(rank, *arguments, **keywords)
        after = _global_settings()
        if after != before:
            raise RankFailedError(f"{_name(function)}: left {after}, found {before}")  # noqa: TRY301 (one road for all failures)
        return pickle.dumps(result)
    except Exception as error:  # noqa: BLE001 (the test that sent the call judges it)
        return _pack(error, traceback.format_exc())


def _pack(error: Exception, text: str) -> bytes:
    try:
        packed = pickle.dumps(_Failure(error, text))
        pickle.loads(packed)
    except (TypeError, AttributeError, pickle.PicklingError):  # its constructor needs more than its message
        return pickle.dumps(_Failure(RankFailedError(f"{type(error).__name__}: {error}"), text))
    return packed


def _global_settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _first(failures: dict[int, _Failure]) -> BaseException:
    """Return the failure that explains the others, annotated with the rank it came from."""

    def is_echo(rank: int) -> bool:
        error = failures[rank].error
        return is_communication(type(error).__name__, str(error))

    rank = min(failures, key=lambda rank: (is_echo(rank), rank))
    failure = failures[rank]
    failure.error.add_note(f"on rank {rank}:\n{failure.text}")
    return failure.error


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
