"""A fork of the fork server that calls functions for the driver: what needs torch, but is no trial."""

from __future__ import annotations

import importlib
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
            ForkServerError: the process has ended, or the function has not returned in time.
            BaseException: what the function raised, with its traceback as a note.
        """
        try:
            self._connection.send((target, arguments))
            if not self._connection.poll(deadline_s):
                self._server.signal(self._pid, signal.SIGKILL)
                raise ForkServerError(f"{target}: did not return within {deadline_s:g} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise ForkServerError(f"{target}: the process that called it has ended") from error
        if isinstance(answer, _Raised):
            raise answer.error
        return answer

    def close(self) -> None:
        """Let the process end, and wait until it has."""
        self._connection.close()
        while (died := self._server.next_death(_POLL_S)) is None or died.pid != self._pid:
            pass

    def _accepted(self, listener: socket.socket) -> Connection:
        """Return the connection of the assistant, or say that it has ended."""
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
    while True:
        try:
            target, arguments = driver.recv()
        except (EOFError, ConnectionError):
            return
        driver.send_bytes(_answer(target, arguments))


def _answer(target: str, arguments: tuple[Any, ...]) -> bytes:
    """Return what a function returns or raises, packed for the driver."""
    module, _, name = target.partition(":")
    try:
        return pickle.dumps(getattr(importlib.import_module(module), name)(*arguments))
    except BaseException as error:  # noqa: BLE001 (the driver raises it, as if it had called the function)
        error.add_note(f"in the assistant:\n{traceback.format_exc()}")
        return _packed(error)


def _packed(error: BaseException) -> bytes:
    """Return a packed exception, or its text where it cannot be packed."""
    try:
        packed = pickle.dumps(_Raised(error))
        pickle.loads(packed)  # noqa: S301 (our own)
    except Exception:  # noqa: BLE001 (an exception of somebody's can refuse in any way)
        return pickle.dumps(_Raised(RuntimeError("".join(traceback.format_exception(error)))))
    return packed
