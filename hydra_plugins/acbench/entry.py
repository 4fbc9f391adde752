"""The commands, in a namespace package: no folder of a user hides it, and it can say which hides another."""

from __future__ import annotations

import gc
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn, TextIO

_PACKAGES = ("harness", "strategies")
_CLI = "harness.command_line.cli"
_SELDOM = 50_000
"""Allocations between two collections of garbage: with Python's 700 they take a third of a large sweep."""

_ENDED_BY_SIGPIPE = 128 + signal.SIGPIPE


def main() -> None:
    """Run `acbench` and leave with its status."""
    _run("acbench", _CLI, defers=True)


def plan() -> None:
    """Run `acbench-plan` and leave with its status."""
    _run("acbench-plan", _CLI, "plan", defers=True)


def calibrate() -> None:
    """Run `acbench-calibrate` and leave with its status."""
    _run("acbench-calibrate", "harness.predict.this_cpu", defers=True)


def fit() -> None:
    """Run `acbench-fit` and leave with its status."""
    _run("acbench-fit", "harness.command_line.fit_command")


def report() -> None:
    """Run `acbench-report` and leave with its status."""
    _run("acbench-report", "harness.report.main")


@contextmanager
def ended_by_its_reader() -> Iterator[None]:
    """End quietly, with the status of a program that SIGPIPE ends, where nobody reads stdout any more.

    A standard stream that is closed or full ends nothing: trials run on and leave their records.
    """
    _open_missing_streams()
    stdout, stderr = _Lossy(1), _Lossy(2, other=1)
    former = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = stdout.as_text(sys.stdout), stderr.as_text(sys.stderr)
    try:
        yield
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, select.POLLOUT)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # another pipe
        _leave_quietly()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_quietly()
        if stdout.lost is not None:
            sys.stderr.write(
                f"acbench: stdout cannot be written: {stdout.lost.strerror}; records are not lost\n"
            )
        sys.stderr.flush()
        sys.stdout, sys.stderr = former
        if stdout.lost is not None:
            sys.exit(1)


class _Lossy(io.FileIO):
    """A standard stream that loses what cannot be written, for want of space for example.

    Args:
        other: descriptor of a stream that tells when a pipe of both has lost its reader; `None`: this does.

    Attributes:
        lost: the error of what was lost first.
    """

    def __init__(self, number: int, other: int | None = None) -> None:
        super().__init__(number, "w", closefd=False)
        self.lost: OSError | None = None
        self._tells = other is None or os.path.sameopenfile(number, other)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self._tells:
                raise
            self.lost = self.lost or error
            return memoryview(data).nbytes

    def as_text(self, former: TextIO) -> TextIO:
        """Return the text stream that takes the place of the interpreter's own."""
        is_unbuffered = bool(getattr(former, "write_through", False))  # as PYTHONUNBUFFERED asks
        return io.TextIOWrapper(
            _Unbuffered(self) if is_unbuffered else io.BufferedWriter(self),
            encoding=former.encoding,
            errors=former.errors,
            line_buffering=bool(former.line_buffering),
            write_through=is_unbuffered,
        )


class _Unbuffered(io.BufferedWriter):
    """Writes at once, and all of it."""

    def write(self, data: Any) -> int:
        count = super().write(data)
        self.flush()
        return count


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that is closed, as cron and daemons leave them.

    Else the next file that is opened gets the number of one, and whoever writes to stdout writes into it.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def folder_hiding(package: str) -> Path | None:
    """Return the folder that Python takes for a package of ours; `None` where it takes ours."""
    spec = PathFinder.find_spec(package)
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    ours = Path(__file__).resolve().parents[2] / package
    return next((folder for folder in folders[:1] if folder.resolve() != ours), None)


def _run(command: str, module: str, function: str = "main", *, defers: bool = False) -> None:
    gc.set_threshold(_SELDOM)
    with ended_by_its_reader():
        _require_ours(command)  # before anything of ours is imported
        if defers:
            importlib.import_module("harness.deferred").install()
        sys.exit(getattr(importlib.import_module(module), function)())


def _leave_quietly() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
    sys.exit(_ENDED_BY_SIGPIPE)


def _require_ours(command: str) -> None:
    hiding = next((folder for folder in map(folder_hiding, _PACKAGES) if folder is not None), None)
    if hiding is not None:
        sys.stderr.write(
            f"{command}: {hiding} hides a package of acbench with the same name, because it comes first on "
            "Python's path; rename the folder, or start the command from another one\n"
        )
        sys.exit(2)
