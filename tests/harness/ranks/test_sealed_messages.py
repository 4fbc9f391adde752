"""Messages of who knows the secret arrive; all others are refused, and why is said."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from harness.ranks.sealed_messages import MOST_BYTES, RefusedMessageError, SealedConnection

SECRET = b"s" * 32
WRONG_SEAL = "its seal is wrong: another secret, or a repeated or changed message"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    host, guest = socket.socketpair()
    with closing(host), closing(guest):
        yield host, guest


def _meet(
    ends: tuple[socket.socket, socket.socket], secret: bytes = SECRET, *, patience_s: float = 5.0
) -> tuple[SealedConnection, SealedConnection]:
    with ThreadPoolExecutor(1) as pool:
        guest = pool.submit(SealedConnection, ends[1], secret, is_host=False, patience_s=patience_s)
        return SealedConnection(ends[0], SECRET, is_host=True, patience_s=patience_s), guest.result()


def test_messages_arrive_in_order_and_both_ways(ends: tuple[socket.socket, socket.socket]) -> None:
    host, guest = _meet(ends)
    for value in ({"a": [1, None]}, "b", {}):
        guest.send(value)
        assert host.receive() == value
        host.send([value])
        assert guest.receive() == [value]


def _frame(guest: SealedConnection, value: object) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + guest._seal(0, body) + body


def _repeated(guest: SealedConnection) -> bytes:
    return 2 * _frame(guest, {})


def _changed(guest: SealedConnection) -> bytes:
    return _frame(guest, {"a": 1}).replace(b"1}", b"2}")


def _reflected(guest: SealedConnection) -> bytes:
    guest._names = guest._names[::-1]
    return _frame(guest, {})


@pytest.mark.parametrize(
    ("frame", "good", "why"),
    [
        pytest.param(_repeated, 1, WRONG_SEAL, id="repeated"),
        pytest.param(_changed, 0, WRONG_SEAL, id="changed"),
        pytest.param(_reflected, 0, WRONG_SEAL, id="of the other direction"),
        pytest.param(lambda _guest: bytes(100), 0, WRONG_SEAL, id="zeros"),
        pytest.param(
            lambda _guest: b"GET / HTTP/1.1\r\n",
            0,
            f"it is {int.from_bytes(b'GET ', 'big')} bytes long, at most {MOST_BYTES} are taken",
            id="garbage",
        ),
        pytest.param(
            lambda _guest: (1 << 31).to_bytes(4, "big"),
            0,
            f"it is {1 << 31} bytes long, at most {MOST_BYTES} are taken",
            id="huge",
        ),
    ],
)
def test_a_message_that_is_none_is_refused(
    ends: tuple[socket.socket, socket.socket],
    frame: Callable[[SealedConnection], bytes],
    good: int,
    why: str,
) -> None:
    host, guest = _meet(ends)
    ends[1].sendall(frame(guest))
    for _ in range(good):
        host.receive()
    with pytest.raises(RefusedMessageError) as refused:
        host.receive()
    assert str(refused.value) == why


def test_another_secret_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    host, guest = _meet(ends, b"t" * 32)
    guest.send({})
    with pytest.raises(RefusedMessageError, match="its seal is wrong"):
        host.receive()


def test_a_message_of_another_connection_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    _, guest = _meet(ends)
    heard = _frame(guest, {})
    other, theirs = socket.socketpair()
    with closing(other), closing(theirs):
        host, _ = _meet((other, theirs))
        theirs.sendall(heard)
        with pytest.raises(RefusedMessageError, match="its seal is wrong"):
            host.receive()


def test_who_says_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        SealedConnection(ends[0], SECRET, is_host=True, patience_s=0.01)
