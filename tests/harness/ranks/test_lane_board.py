"""The board of a lane: its nodes share values, strangers neither read nor write them, and are named."""

from __future__ import annotations

import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.ranks.lane_board import BoardLostError, HostedBoard, hosting, join
from harness.ranks.sealed_messages import SealedConnection
from harness.records.files import ForeignFileError


@pytest.fixture
def board(tmp_path: Path) -> Iterator[HostedBoard]:
    with hosting("127.0.0.1", tmp_path / "address") as board:
        yield board


def _connect(folder: Path) -> socket.socket:
    address = json.loads((folder / "address").read_text())
    return socket.create_connection((address["host"], address["port"]))


def test_the_nodes_of_a_lane_share_values(board: HostedBoard, tmp_path: Path) -> None:
    guests = [join(tmp_path / "address") for _ in range(2)]
    first, second = (guest for guest in guests if guest is not None)
    assert first.get("turn0") is None
    board.set("turn0", {"job": {}})
    first.set("beat/1", 3)
    assert (first.get("turn0"), second.get("beat/1"), board.get("beat/1")) == ({"job": {}}, 3, 3)
    for guest in (first, second):
        guest.close()


def test_address_and_secret_are_for_the_user_alone_and_fresh(tmp_path: Path) -> None:
    secrets = set()
    before = os.umask(0)
    try:
        for _ in range(2):
            with hosting("127.0.0.1", tmp_path / "address"):
                assert (tmp_path / "address").stat().st_mode & 0o777 == 0o600
                secrets.add(json.loads((tmp_path / "address").read_text())["secret"])
    finally:
        os.umask(before)
    assert len(secrets) == 2


def _without_secret(connection: socket.socket) -> None:
    connection.sendall(b"x" * 16 + pickle.dumps(print) * 100)


def _with_another(connection: socket.socket) -> None:
    SealedConnection(connection, b"?" * 32, is_host=False, patience_s=5).send(
        {"name": "halt0", "is_set": True}
    )


def _huge(connection: socket.socket) -> None:
    connection.sendall(b"x" * 16 + b"\xff" * 4)


@pytest.mark.parametrize(
    ("send", "why"),
    [
        pytest.param(_without_secret, "it is 21", id="a pickle"),
        pytest.param(_with_another, "its seal is wrong", id="another secret"),
        pytest.param(_huge, "it is 4294967295 bytes long", id="a huge message"),
    ],
)
def test_a_stranger_is_refused_and_named(
    board: HostedBoard,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    send: Callable[[socket.socket], None],
    why: str,
) -> None:
    with _connect(tmp_path) as connection:
        send(connection)
        end_s = time.monotonic() + 30
        while not board.refused and time.monotonic() < end_s:
            time.sleep(0.001)
    assert f"acbench: refused a message to this lane from 127.0.0.1: {why}" in capfd.readouterr().err
    assert board.get("halt0") is None
    guest = join(tmp_path / "address")
    assert guest is not None
    guest.set("halt0", value=True)  # those who know the secret are still served
    guest.close()


def test_it_listens_on_one_address_alone(board: HostedBoard, tmp_path: Path) -> None:
    assert board.host == "127.0.0.1"
    port = json.loads((tmp_path / "address").read_text())["port"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port)).close()


def test_an_address_that_others_could_have_written_is_not_believed(
    board: HostedBoard, tmp_path: Path
) -> None:
    (tmp_path / "address").chmod(0o620)
    with pytest.raises(ForeignFileError, match="must have mode 0600, got 0620"):
        join(tmp_path / "address")
    assert board.refused == []


def test_without_node_0_a_guest_hears_of_it(tmp_path: Path) -> None:
    assert join(tmp_path / "address") is None
    with hosting("127.0.0.1", tmp_path / "address"):
        guest = join(tmp_path / "address")
    assert guest is not None
    with closing(guest), pytest.raises(BoardLostError):
        guest.get("turn0")
    with pytest.raises(BoardLostError):
        join(tmp_path / "address")
