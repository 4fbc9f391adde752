"""A process that imports torch once and forks fresh children from itself in milliseconds.

The standard library has a fork server too. This one differs where ranks need it to. A child does not import
the driver's `__main__` (Hydra costs half a second). A death is reported with its time. One process can have
several servers. When the driver ends, by whatever means, every child ends: the server sees the closed
connection, and the kernel kills children whose server has died.

The server stays single-threaded and never touches CUDA, so that forking it is safe. Linux only
(`pidfd_open`, `PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

_CLOSE_S = 10.0
_PR_SET_PDEATHSIG = 1

_BRIEF_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long OpenMP's threads spin for work before they sleep, unless the user has decided.

By default they spin for milliseconds, which on a machine with other load makes a step several times slower.
One step of gpt_nano on two cores, quiet and beside three busy processes: by default 48 and 410 ms, so 47 and
227 ms, without any spinning 66 and 169 ms.
"""

_ASKS_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets `torch.cuda.is_available` ask the driver's library, unless the user has decided.

By default it initialises the driver, and CUDA then fails in every child that is forked afterwards.
Source: torch/cuda/__init__.py, `is_available`.
"""


class ForkServerError(RuntimeError):
    """The fork server has ended, and with it every child."""


@dataclass(frozen=True, slots=True)
class Died:
    """The end of one child.

    Fields:
        pid: as `ForkServer.start` returned it.
        code: exit status; `-n` when signal n killed it.
        time: when it was noticed, in seconds of `time.time`.
    """

    pid: int
    code: int
    time: float


@dataclass(frozen=True, slots=True)
class _Start:
    """Asks for a child.

    Fields:
        target: `package.module:function`.
        argument: argument of that function, pickled.
    """

    target: str
    argument: bytes


@dataclass(frozen=True, slots=True)
class _Signal:
    """Asks for a signal to a child.

    Fields:
        pid: pid of the child.
        number: number of the signal.
    """

    pid: int
    number: int


class ForkServer:
    """The driver's handle of one fork server, which imports while the driver does something else.

    The environment and `sys.path` of the server are those of the driver at construction; what the user leaves
    open of OpenMP's waiting is decided here, because it is read when torch is imported.

    Args:
        preload: modules that every child shall find imported.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._is_ready = False
        self._deaths: deque[Died] = deque()
        self._children: set[int] = set()
        self._connection, theirs = Pipe()
        # Slurm announces a time limit to every process of a step, and one that cares not would die of it
        program = (
            "import signal, sys; signal.signal(signal.SIGUSR2, signal.SIG_IGN); "
            f"sys.path[:] = {sys.path!r}; "
            f"from harness.ranks.forkserver import serve; serve({theirs.fileno()}, {tuple(preload)!r})"
        )
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and program)
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=server_environment(),
                start_new_session=True,  # Ctrl-C on the terminal reaches the driver only
            )

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def await_ready(self) -> None:
        """Wait until all modules are imported.

        Raises:
            ForkServerError: an import failed; the server's traceback is on stderr.
        """
        if self._is_ready:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._receive()
            undo.pop_all()
        self._is_ready = True

    def start(self, target: str, argument: Any) -> int:
        """Fork a child that calls `target(argument)`, and return its process id.

        Args:
            target: `package.module:function`; its return ends the child with status 0.
            argument: anything that pickles.

        Raises:
            ForkServerError: the server has ended, or an import failed.
        """
        self.await_ready()
        self._send(_Start(target, pickle.dumps(argument)))
        while isinstance(answer := self._receive(), Died):
            self._deaths.append(answer)
        pid = int(answer)
        self._children.add(pid)
        return pid

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a child that `next_death` has not returned yet; nothing happens if it is dead."""
        self._send(_Signal(pid, number))

    def next_death(self, timeout_s: float) -> Died | None:
        """Return the next death in order of time, `None` when there is none within `timeout_s`.

        Raises:
            ForkServerError: the server has ended.
        """
        if not self._deaths:
            if not self._connection.poll(max(timeout_s, 0)):
                return None
            self._deaths.append(self._receive())
        died = self._deaths.popleft()
        self._children.discard(died.pid)
        return died

    def close(self) -> None:
        """End the server and every child."""
        self._connection.close()
        if not self._is_ready:
            self._process.kill()  # while it imports it would not hear of us
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._process.wait() != 0:  # killed: the kernel ends its children, but not what they started
            for pid in self._children:
                _kill_group(pid)
        self._children.clear()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise ForkServerError(f"fork server {self.pid}: has ended") from error

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ForkServerError(f"fork server {self.pid}: has ended") from error


def server_environment() -> dict[str, str]:
    """Return the driver's environment; how OpenMP waits and CUDA is found is ours unless the user says it."""
    is_decided = not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}.isdisjoint(os.environ)
    return _ASKS_NVML | ({} if is_decided else _BRIEF_SPIN) | os.environ


def serve(fileno: int, preload: Sequence[str]) -> None:
    """Import `preload`, then fork and reap children until the driver closes its end of the connection."""
    driver = Connection(fileno)
    gc.disable()  # what is imported stays
    for name in preload:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a child shall not copy the pages of what the server imported
    children: dict[int, int] = {}  # descriptor -> process id
    with contextlib.suppress(EOFError, ConnectionError):  # the driver has closed its end, or died
        driver.send(None)  # it may start children now
        while True:
            _attend(driver, children)
    for pid in children.values():
        _kill_group(pid)
    for pid in children.values():
        os.waitpid(pid, 0)
    os._exit(0)


def _attend(driver: Connection, children: dict[int, int]) -> None:
    ready = wait([driver, *children])
    for descriptor in ready:
        if isinstance(descriptor, int):
            driver.send(_reap(descriptor, children.pop(descriptor)))
    if driver not in ready:
        return
    match driver.recv():
        case _Start() as start:
            driver.send(_fork(start, driver, children))
        case _Signal(pid, number):
            if pid in children.values():
                os.kill(pid, number)


def _reap(descriptor: int, pid: int) -> Died:
    died_s = time.time()
    _kill_group(pid)  # what the child started and left behind; its own status is already fixed
    _, status = os.waitpid(pid, 0)
    os.close(descriptor)
    return Died(pid, os.waitstatus_to_exitcode(status), died_s)


def _kill_group(pid: int) -> None:
    for send in (os.killpg, os.kill):  # a child that has not become a group leader yet has no group
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _fork(start: _Start, driver: Connection, children: dict[int, int]) -> int:
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        children[os.pidfd_open(pid)] = pid
        return pid
    try:
        die_with(server, signal.SIGKILL)
        os.setsid()
        driver.close()
        for descriptor in children:
            os.close(descriptor)
        _call(start)
    finally:
        _end_child()


def die_with(parent: int, number: int) -> None:
    """Ask the kernel for signal `number` when the process that started this one dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel had noted our wish
        os._exit(1)


def _call(start: _Start) -> None:
    module, _, name = start.target.partition(":")
    function = getattr(importlib.import_module(module), name)
    function(pickle.loads(start.argument))  # noqa: S301 (from our driver)


def _end_child() -> NoReturn:
    """Leave without the interpreter's teardown: it belongs to the server, and torch's can abort."""
    error = sys.exc_info()[1]
    if error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)
