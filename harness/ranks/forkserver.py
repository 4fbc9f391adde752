"""A process that imports torch once and forks fresh children from itself in milliseconds.

The standard library has a fork server too. This one differs where ranks need it to. A child does not import
the driver's `__main__` (Hydra costs half a second). A death is reported with its time. One process can have
several servers. When the driver ends, by whatever means, every child ends: the server sees the closed
connection, and the kernel kills children whose server has died.

What children start ends with the last of them, in whatever session it hides: the kernel hands orphans to the
server. A child leaves by `os._exit` alone; no exception of its own leads it into the server's code.

The server stays single-threaded and never touches CUDA, so that forking it is safe. Linux only
(`pidfd_open`, `PR_SET_PDEATHSIG`, `PR_SET_CHILD_SUBREAPER`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from harness.process_tree import MARK, children_of, end_marked
from strategies.last_words import last_words

_CLOSE_S = 10.0
_ORPHANS_S = 5.0
_POLL_S = 0.01
_PIPE_BYTES = 64 * 1024  # what a pipe holds by default
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_BRIEF_SPIN = {"GOMP_SPINCOUNT": "10000"}
"""How long OpenMP's threads spin for work before they sleep, unless the user has decided.

By default they spin for milliseconds, which on a machine with other load makes a step several times slower.
One step of gpt_nano on two cores, quiet and with three busy processes: by default 48 and 410 ms, so 47 and
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
        kind, message: class and text of the exception that its target raised; `None` where it raised none.
    """

    pid: int
    code: int
    time: float
    kind: str | None = None
    message: str | None = None


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
    """Asks for a signal to a child."""

    pid: int
    number: int


@dataclass(frozen=True, slots=True)
class _Child:
    """A child that the server has not buried yet. `words`: descriptor from which its last words are read."""

    pid: int
    words: int


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
        self._mark = secrets.token_hex(8)
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
                env=server_environment() | {MARK: self._mark},
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
        return int(answer)

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
        return self._deaths.popleft()

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
            end_marked(self._mark)

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
    """Prepare `preload`, then fork and reap children until the driver closes its end of the connection.

    Args:
        fileno: descriptor of the connection.
        preload: modules to import, or `module:function` for a function to call after that.
    """
    driver = Connection(fileno)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.disable()  # what is imported stays
    for name in preload:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a child shall not copy the pages of what the server imported
    children: dict[int, _Child] = {}  # by descriptor
    with contextlib.suppress(EOFError, ConnectionError):  # the driver has closed its end, or died
        driver.send(None)  # it may start children now
        while True:
            _attend(driver, children)
    for child in children.values():
        _kill_group(child.pid)
    for child in children.values():
        os.waitpid(child.pid, 0)
    _end_orphans()
    os._exit(0)


def _attend(driver: Connection, children: dict[int, _Child]) -> None:
    """Serve one message of the driver, or the deaths of children."""
    ready = wait([driver, *children])
    for descriptor in ready:
        if isinstance(descriptor, int):
            died = _reap(descriptor, children.pop(descriptor))
            if not children:
                _end_orphans()
            driver.send(died)
    if driver not in ready:
        return
    match driver.recv():
        case _Start() as start:
            driver.send(_fork(start, driver, children))
        case _Signal(pid, number):
            if any(child.pid == pid for child in children.values()):
                os.kill(pid, number)


def _reap(descriptor: int, child: _Child) -> Died:
    """End what a dead child has left behind; return how it died and what it said last."""
    died_s = time.time()
    _kill_group(child.pid)  # what the child started and left behind; its own status is already fixed
    _, status = os.waitpid(child.pid, 0)
    os.close(descriptor)
    kind, message = _heard(child.words)
    return Died(child.pid, os.waitstatus_to_exitcode(status), died_s, kind, message)


def _heard(words: int) -> tuple[str, str] | tuple[None, None]:
    with open(words, "rb", buffering=0) as pipe:
        told = pipe.read(_PIPE_BYTES)  # `None` where a process that the child has left holds the other end
    try:
        kind, message = json.loads(told or b"")
    except ValueError:
        return None, None
    return str(kind), str(message)


def _kill_group(pid: int) -> None:
    for send in (os.killpg, os.kill):  # a child that has not become a group leader yet has no group
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _end_orphans() -> None:
    """End what the children have left in sessions of its own; this process is the parent of it all now."""
    end_s = time.monotonic() + _ORPHANS_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end_s:
            # it raises where none is left, mostly before anybody walks through /proc
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
                continue  # it is buried now
            for pid in children_of(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def _fork(start: _Start, driver: Connection, children: dict[int, _Child]) -> int:
    """Fork a child that does what it was started for; return its pid."""
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    words, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        inherited = (words, *children, *(child.words for child in children.values()))
        _live(start, server, driver, inherited, theirs)
    os.close(theirs)
    os.set_blocking(words, False)
    children[os.pidfd_open(pid)] = _Child(pid, words)
    return pid


def _live(start: _Start, server: int, driver: Connection, inherited: Sequence[int], words: int) -> NoReturn:
    """Be the child: call the target and leave, whatever it raises and whoever it has forked.

    It leaves without the interpreter's teardown, which belongs to the server; torch's can abort.
    """
    code, pid = 1, os.getpid()
    try:
        die_with(server, signal.SIGKILL)
        os.setsid()
        driver.close()
        for descriptor in inherited:
            os.close(descriptor)
        _call(start)
        code = 0
        flush_streams()
    except BaseException as error:  # noqa: BLE001 (the end of a process)
        if os.getpid() == pid:
            _tell(error, words)
    finally:
        os._exit(code)


def _tell(error: BaseException, words: int) -> None:
    """Tell the server what ended this child; print it where that is possible."""
    said = last_words(error)
    os.write(words, json.dumps([said.kind, said.message]).encode())
    with contextlib.suppress(Exception):  # a log that is closed or full
        sys.stderr.write(said.traceback)
    flush_streams()


def flush_streams() -> None:
    """Write out what Python and C hold back of stdout and stderr, as far as they take it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's code may have put anything there
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def die_with(parent: int, number: int) -> None:
    """Ask the kernel for signal `number` when the process that started this one dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel had noted our wish
        os._exit(1)


def _call(start: _Start) -> None:
    module, _, name = start.target.partition(":")
    function = getattr(importlib.import_module(module), name)
    function(pickle.loads(start.argument))  # noqa: S301 (from our driver)
