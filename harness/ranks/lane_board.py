"""The board of a lane: JSON values by name, on node 0, which the lane's other nodes read and write.

It listens on the interface of the cluster alone. Its address and its secret, a fresh one for every start of a
lane, are in a file that only the user of the lane can read (`records.files`); every message is sealed with
the secret (`sealed_messages`). What a stranger sends is refused and named on stderr.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.ranks.sealed_messages import SECRET_BYTES, RefusedMessageError, SealedConnection
from harness.records.fields import decode
from harness.records.files import read_private, write_atomically

_FIRST_MESSAGE_S = 10.0
_ANSWER_S = 30.0
_MOST_CONNECTIONS = 256
_MOST_NAMED = 20
"""Refusals that are written; somebody who tries for ever shall not fill a log."""


class BoardLostError(Exception):
    """Node 0 is gone, or something else answers in its place."""


class Board(Protocol):
    """The contract of the host and of a guest of a board."""

    def set(self, name: str, value: Any) -> None:
        """Put a JSON value on the board, in the place of an earlier one."""

    def get(self, name: str) -> Any:
        """Return a value, `None` where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Address:
    """The address of a board; its file is private. `secret`: secret of the lane, hexadecimal."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """A request of a guest. `is_set`: whether to put the value on the board; otherwise it is asked for."""

    name: str
    is_set: bool
    value: Any = None


class HostedBoard:
    """The board itself, in the process of node 0.

    Attributes:
        host: address of this machine on the network of the cluster.
        refused: why messages were refused, with the address of who sent them.
    """

    def __init__(self, host: str, listener: socket.socket, secret: bytes) -> None:
        self.host = host
        self.refused: list[str] = []
        self._listener = listener
        self._secret = secret
        self._values: dict[str, Any] = {}
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, name: str, value: Any) -> None:
        """Put a JSON value on the board, in the place of an earlier one."""
        self._values[name] = value

    def get(self, name: str) -> Any:
        """Return a value, `None` where there is none."""
        return self._values.get(name)

    def close(self) -> None:
        """Accept nobody any more, and leave those who are there."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            each.close()

    def _accept(self) -> None:
        """Serve each connection in a thread of its own, until the board is closed."""
        while True:
            try:
                connection, (peer, *_) = self._listener.accept()
            except OSError:  # the board is closed
                return
            if len(self._open) >= _MOST_CONNECTIONS:
                self._refuse(peer, f"there are {_MOST_CONNECTIONS} connections already")
                connection.close()
                continue
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Answer the requests of one guest until it leaves."""
        try:
            guest = SealedConnection(connection, self._secret, is_host=True, patience_s=_FIRST_MESSAGE_S)
            while True:
                request = decode(_Request, guest.receive(), "message")
                if request.is_set:
                    self.set(request.name, request.value)
                guest.send(self.get(request.name))
        except (RefusedMessageError, ValueError) as error:
            self._refuse(peer, str(error))
        except OSError:  # it has left, or has not said in time who it is
            return
        finally:
            self._open.discard(connection)
            connection.close()

    def _refuse(self, peer: str, why: str) -> None:
        if len(self.refused) < _MOST_NAMED:
            sys.stderr.write(f"acbench: refused a message to this lane from {peer}: {why}\n")
            self.refused.append(f"{peer}: {why}")  # who reads of it here finds it on stderr already


class JoinedBoard:
    """A guest's view of the board of node 0; threads may share it."""

    def __init__(self, connection: SealedConnection) -> None:
        self._connection = connection
        self._turn = threading.Lock()

    def set(self, name: str, value: Any) -> None:
        """Put a JSON value on the board, in the place of an earlier one.

        Raises:
            BoardLostError: node 0 is gone.
        """
        self._ask(_Request(name=name, is_set=True, value=value))

    def get(self, name: str) -> Any:
        """Return a value, `None` where there is none. Raises BoardLostError: node 0 is gone."""
        return self._ask(_Request(name=name, is_set=False))

    def close(self) -> None:
        """Leave the board."""
        self._connection.close()

    def _ask(self, request: _Request) -> Any:
        with self._turn:
            try:
                self._connection.send(asdict(request))
                return self._connection.receive()
            except (OSError, RefusedMessageError) as error:
                raise BoardLostError(str(error)) from error


@contextmanager
def hosting(host: str, address: Path) -> Iterator[HostedBoard]:
    """Host the board of a lane, and leave its address and secret in a private file for the other nodes.

    Args:
        host: numeric address of this machine on the network of the cluster, where alone it listens.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    with listening(host) as listener:
        board = HostedBoard(host, listener, secret)
        found = _Address(host=host, port=listener.getsockname()[1], secret=secret.hex())
        try:
            write_atomically(address, json.dumps(asdict(found)))
            yield board
        finally:
            board.close()


def join(address: Path) -> JoinedBoard | None:
    """Connect to the board of a lane; `None` as long as its address is not there.

    Raises:
        BoardLostError: nobody answers there.
        ForeignFileError: somebody else has written the address, or can read it.
    """
    try:
        found = decode(_Address, json.loads(read_private(address)), address.name)
    except FileNotFoundError:
        return None
    try:
        with contextlib.ExitStack() as undo:
            connection = socket.create_connection((found.host, found.port), timeout=_ANSWER_S)
            undo.callback(connection.close)
            sealed = SealedConnection(
                connection,
                bytes.fromhex(found.secret),
                is_host=False,
                patience_s=_ANSWER_S,
                later_s=_ANSWER_S,
            )
            undo.pop_all()
    except OSError as error:
        raise BoardLostError(str(error)) from error
    return JoinedBoard(sealed)


def listening(host: str) -> socket.socket:
    """Return a socket that listens on a free port of one address of this machine.

    Raises:
        OSError: this machine does not have that address.
    """
    family, *_, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(target[:2], family=family, backlog=_MOST_CONNECTIONS)
