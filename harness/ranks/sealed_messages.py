"""Sealed messages over a connection: JSON of limited length that only who knows the secret can write.

A connection begins with a nonce from either side. Each message is its length, its seal and its JSON. The seal
is the HMAC-SHA256 of direction, both nonces, number of the message and JSON: a message with another secret,
repeated, moved to another connection or changed has a wrong seal. A message is looked at when its seal is
right, never before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

MOST_BYTES = 256 << 10
"""Longest message."""

SECRET_BYTES = 32

_NONCE_BYTES = 16
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class RefusedMessageError(Exception):
    """A message that was not sealed with the secret."""


class SealedConnection:
    """One end of a connection; either end sends and receives in turn.

    Args:
        patience_s: time until the first message is there, all of it.
        later_s: time for each part of a later one; `None` is any.

    Raises:
        OSError: the other end is gone, or silent for too long.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        *,
        is_host: bool,
        patience_s: float,
        later_s: float | None = None,
    ) -> None:
        self._connection = connection
        self._secret = secret
        self._names = (b"host", b"guest") if is_host else (b"guest", b"host")
        self._counts = [0, 0]  # sent and received
        self._end_s: float | None = time.monotonic() + patience_s
        self._later_s = later_s
        own = os.urandom(_NONCE_BYTES)
        connection.sendall(own)
        theirs = self._read(_NONCE_BYTES)
        self._nonces = own + theirs if is_host else theirs + own

    def send(self, value: Any) -> None:
        """Send a JSON value. Raises OSError: the other end is gone."""
        body = json.dumps(value).encode()
        self._connection.sendall(_LENGTH.pack(len(body)) + self._seal(0, body) + body)

    def receive(self) -> Any:
        """Return the next value.

        Raises:
            RefusedMessageError: its seal is wrong, it is too long, or no JSON.
            OSError: the other end is gone, or silent for too long.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MOST_BYTES:
            raise RefusedMessageError(f"it is {length} bytes long, at most {MOST_BYTES} are taken")
        seal = self._read(hashlib.sha256().digest_size)
        body = self._read(length)
        if not hmac.compare_digest(seal, self._seal(1, body)):
            raise RefusedMessageError("its seal is wrong: another secret, or a repeated or changed message")
        self._end_s = None
        self._connection.settimeout(self._later_s)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedMessageError(f"it is no JSON: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _seal(self, direction: int, body: bytes) -> bytes:
        number = _NUMBER.pack(self._counts[direction])
        self._counts[direction] += 1
        said = b"".join((self._names[direction], self._nonces, number, body))
        return hmac.digest(self._secret, said, "sha256")

    def _read(self, count: int) -> bytes:
        """Return the next `count` bytes, within what is left of the patience."""
        read = b""
        while len(read) < count:
            if self._end_s is not None:
                self._connection.settimeout(max(self._end_s - time.monotonic(), 0.001))
            part = self._connection.recv(count - len(read))
            if not part:
                raise ConnectionResetError("the other end has closed the connection")
            read += part
        return read
