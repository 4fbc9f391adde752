"""Functions that tests let another process call; importing them imports no torch, which takes a second."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn

from harness.errors import ConfigError, Terminated


class _Stubborn(Exception):  # noqa: N818 (nobody sees it)
    """Pickles, but cannot be made again."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def product(one: int, other: int) -> int:
    return one * other


def pid() -> int:
    return os.getpid()


def fails(kind: str) -> NoReturn:
    errors: dict[str, BaseException] = {
        "refusal": ConfigError("mesh.tp", "must be 1"),
        "defect": ZeroDivisionError("by zero"),
        "termination": Terminated(143),
        "stubborn": _Stubborn("1", "2"),
    }
    raise errors[kind]


def dies() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
    raise AssertionError


def exits() -> NoReturn:
    os._exit(0)


def closes_everything() -> None:
    os.closerange(0, 1024)


def writes_everywhere() -> None:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, b"\x00\x00\x00\x04{]x\n")


def forks() -> int:
    return os.fork()


def ends_its_server(file: str) -> int:
    """End the fork server, but for the first call only."""
    path = Path(file)
    if not path.exists():
        path.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return 42


def sleeps() -> None:
    signal.pause()
