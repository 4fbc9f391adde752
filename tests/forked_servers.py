"""Fork servers that are forks: of the one of standing ranks, which is a fork of the process of the tests.

    with forks_of(rank_server):
        server = ForkServer(PRELOAD)  # imports only what the other has not

The one of standing ranks begins before the first test, and waits until somebody asks for it.

That a server begins as a program of its own is for the tests of `tests/harness/ranks`, and for commands that
are started as people start them. The environment of such a fork is not the one in /proc.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from harness.ranks import forkserver
from harness.ranks.forkserver import ForkServer, die_with

_PATIENCE_S = 240.0
_POLL_S = 0.01
_STREAMS = (1, 2)
_ABOVE = 200
"""Number from which descriptors wait that are to have one of those that others still have."""


@dataclass(frozen=True, slots=True)
class _Program:
    """The program of a fork server. `numbers`: those that the descriptors have there which are sent to it."""

    text: str
    environment: dict[str, str]
    folder: str
    numbers: tuple[int, ...]
    meeting: str


@contextmanager
def forks_of(server: ForkServer) -> Iterator[None]:
    """Let fork servers that start inside begin as forks of `server`, which must outlive them."""
    with starting(partial(_Fork, server)):
        yield


@contextmanager
def starting(process: Callable[..., Any]) -> Iterator[None]:
    """Let fork servers that start inside begin as another process than one of `subprocess`."""
    known = SimpleNamespace(
        Popen=process,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    with mock.patch.object(forkserver, "subprocess", known):
        yield


def run(program: _Program) -> None:
    """Be a fork server: with the environment, folder and descriptors of a program of its own."""
    with socket.socket(socket.AF_UNIX) as meeting:
        meeting.connect(program.meeting)
        _, given, _, _ = socket.recv_fds(meeting, 1, len(program.numbers))
        waiting = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for each in given]
    for number, each in zip(program.numbers, waiting, strict=True):
        os.dup2(each, number)
    close_all_but({0, *program.numbers})
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    exec(program.text, {})  # it never returns


def warn_as_a_program() -> None:
    """Let warnings be what they are in a program: in tests they are errors."""
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def log_as_a_program() -> None:
    """Let handlers log to stderr: in tests theirs is a captured file, whose number a socket may get here."""
    loggers = [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    for handler in chain.from_iterable(each.handlers for each in loggers):
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr  # without a flush: the old one may be closed


def close_all_but(kept: set[int]) -> None:
    """Close what a program of its own would not have: the driver's end of a connection among it."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):  # what listed the others is closed
                os.close(int(path.name))


class Standby:
    """A fork of this process that becomes a fork server once it is asked to, or ends with this process.

    So it has what was imported and collected, and nothing of what tests did.

    Args:
        preload: modules that every child shall find imported.
        said: a file for what it and its children print.
    """

    def __init__(self, preload: Sequence[str], said: Path) -> None:
        asks, self._asked = os.pipe()
        with starting(partial(_Waiting, said, asks)):
            self._server = ForkServer(preload)
        os.close(asks)

    def server(self) -> ForkServer:
        """Return the server, which is to be closed."""
        os.write(self._asked, b".")
        os.close(self._asked)
        return self._server


class Child:
    """A fork of this process, which `ForkServer` starts; stands for its `subprocess.Popen`."""

    def __init__(self) -> None:
        self._code: int | None = None
        self.pid = os.fork()

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        end_s = time.monotonic() + (_PATIENCE_S if timeout_s is None else timeout_s)
        while self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("a fork server", end_s)
            else:
                time.sleep(_POLL_S)
        return self._code


class _Waiting(Child):
    """The one of standing ranks, until somebody asks for it."""

    def __init__(
        self,
        said: Path,
        asks: int,
        words: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_: Any,
    ) -> None:
        parent = os.getpid()
        super().__init__()
        if self.pid:
            return
        try:
            die_with(parent, signal.SIGKILL)
            close_all_but({*range(3), asks, *pass_fds})
            if os.read(asks, 1):
                os.close(asks)
                with said.open("ab", buffering=0) as file:
                    for number in _STREAMS:
                        os.dup2(file.fileno(), number)
                sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
                os.setsid()
                os.environ.clear()
                os.environ.update(env)
                warn_as_a_program()
                log_as_a_program()
                exec(words[-1], {})  # it never returns
        except BaseException:  # noqa: BLE001 (the end of a process)
            traceback.print_exc()
        finally:
            os._exit(1)


class _Fork:
    """What `ForkServer` starts; stands for its `subprocess.Popen`."""

    _codes: ClassVar[dict[tuple[int, int], int]] = {}
    """Exit statuses by the servers that the dead were forks of, and by themselves."""

    def __init__(
        self,
        server: ForkServer,
        words: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_: Any,
    ) -> None:
        self._server = server
        numbers = (*_STREAMS, *pass_fds)
        with tempfile.TemporaryDirectory(prefix="fork-") as folder, socket.socket(socket.AF_UNIX) as meeting:
            address = f"{folder}/meeting"
            meeting.bind(address)
            meeting.listen(1)
            meeting.settimeout(_PATIENCE_S)
            program = _Program(words[-1], dict(env), str(Path.cwd()), numbers, address)
            self.pid = server.start(f"{__name__}:run", program)
            self._codes.pop(self._key, None)  # of another process with this number
            connection, _ = meeting.accept()
            with connection:
                socket.send_fds(connection, [b"."], numbers)

    @property
    def _key(self) -> tuple[int, int]:
        return self._server.pid, self.pid

    def kill(self) -> None:
        self._server.signal(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        end_s = time.monotonic() + (_PATIENCE_S if timeout_s is None else timeout_s)
        while self._key not in self._codes:
            died = self._server.next_death(end_s - time.monotonic())
            if died is None:
                raise subprocess.TimeoutExpired("a fork server", end_s)
            self._codes[self._server.pid, died.pid] = died.code
        return self._codes[self._key]
