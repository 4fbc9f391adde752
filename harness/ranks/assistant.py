"""A fork of the fork server that calls functions for the driver: what needs torch, but is no trial."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.ranks.forkserver import ForkServer, ForkServerError

_POLL_S = 0.1
_END_S = 5.0
"""Longest time from the end of the connection to that of the process."""


class AssistantEndedError(ForkServerError):
    """The process that called a function has ended. `ending`: how it ended, `exited with status 0`."""

    def __init__(self, target: str, ending: str) -> None:
        super().__init__(f"{target}: the process that called it {ending}")
        self.ending = ending


class LateAnswerError(ForkServerError):
    """A function has not returned in time."""


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class Assistant:
    """The driver's handle of one such process; it lives until `close`, so that it imports nothing twice.

    Args:
        server: fork server without other children until `close`, because it reports deaths to one reader.

    Raises:
        ForkServerError: the server or the process has ended.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        with (
            tempfile.TemporaryDirectory(prefix="acbench-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            path = str(Path(folder, "assistant"))
            listener.bind(path)
            listener.listen()
            self._pid = server.start(f"{__name__}:serve", path)
            self._connection = self._accepted(listener)

    def call(self, target: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        """Return what a function returns there.

        Args:
            target: `package.module:function`.
            arguments: anything that pickles, as the result must.
            deadline_s: seconds after which the process is killed; `None` waits for ever.

        Raises:
            AssistantEndedError: the process has ended.
            LateAnswerError: the function has not returned in time.
            ForkServerError: the fork server has ended.
            BaseException: what the function raised, with its traceback as a note.
        """
        try:
            self._connection.send((target, arguments))
            is_answered = self._connection.poll(deadline_s)
            answer = self._connection.recv() if is_answered else None
        except pickle.PicklingError:
            raise
        except Exception as error:  # it is gone, or the user's code has written into our connection
            raise AssistantEndedError(target, self._ending(error)) from error
        if not is_answered:
            self._server.signal(self._pid, signal.SIGKILL)
            raise LateAnswerError(f"{target}: did not return within {deadline_s:g} s")
        if isinstance(answer, _Raised):
            raise answer.error
        return answer

    def close(self) -> None:
        """Let the process end, and wait until it has."""
        self._connection.close()
        while (died := self._server.next_death(_POLL_S)) is None or died.pid != self._pid:
            pass

    def _ending(self, error: Exception) -> str:
        """Return how the process has ended; it is ended if it has not.

        Raises:
            ForkServerError: the fork server has ended with it.
        """
        is_closed = isinstance(error, EOFError | ConnectionError)
        died = self._server.next_death(_END_S) if is_closed else None
        if died is None:
            self._server.signal(self._pid, signal.SIGKILL)
            return f"gave no answer that can be read ({type(error).__name__})"
        return (
            f"was ended by {_signal_name(-died.code)}" if died.code < 0 else f"exited with status {died.code}"
        )

    def _accepted(self, listener: socket.socket) -> Connection:
        listener.settimeout(_POLL_S)
        while True:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._server.next_death(0) is not None:
                    raise ForkServerError(
                        f"fork server {self._server.pid}: its assistant has ended"
                    ) from None
            else:
                accepted.setblocking(True)
                return Connection(accepted.detach())


def serve(path: str) -> None:
    """Call what the driver asks for, until it closes its end."""
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(path)
        driver = Connection(ours.detach())
    pid = os.getpid()
    while True:
        try:
            target, arguments = driver.recv()
        except (EOFError, ConnectionError):
            return
        answer = _answer(target, arguments)
        if os.getpid() != pid:  # the user's code has forked: nobody else speaks for this process
            os._exit(1)
        driver.send_bytes(answer)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _answer(target: str, arguments: tuple[Any, ...]) -> bytes:
    """Return what a function returns or raises, packed for the driver."""
    module, _, name = target.partition(":")
    try:
        return pickle.dumps(getattr(importlib.import_module(module), name)(*arguments))
    except BaseException as error:  # noqa: BLE001 (the driver raises it, as if it had called the function)
        error.add_note(f"in the assistant:\n{traceback.format_exc()}")
        return _packed(error)


def _packed(error: BaseException) -> bytes:
    try:
        packed = pickle.dumps(_Raised(error))
        pickle.loads(packed)  # noqa: S301 (our own)
    except Exception:  # noqa: BLE001 (an exception of somebody's can refuse in any way)
        return pickle.dumps(_Raised(RuntimeError("".join(traceback.format_exception(error)))))
    return packed
