"""The commands, in a namespace package: no folder of a user hides it, and it can say which hides another."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

_PACKAGES = ("harness", "strategies")
_ENDED_BY_SIGPIPE = 128 + signal.SIGPIPE


def main() -> None:
    """Run `acbench` and leave with its status."""
    _run("acbench", "harness.__main__")


def plan() -> None:
    """Run `acbench-plan` and leave with its status."""
    _run("acbench-plan", "harness.__main__", "plan")


def report() -> None:
    """Run `acbench-report` and leave with its status."""
    _run("acbench-report", "harness.report.main")


@contextmanager
def ended_by_its_reader() -> Iterator[None]:
    """End quietly, with the status of a program that SIGPIPE ends, where nobody reads stdout any more."""
    try:
        yield
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise  # another pipe
        _leave_quietly()
    finally:
        try:
            if sys.stdout is not None:  # it was closed before
                sys.stdout.flush()
        except BrokenPipeError:
            _leave_quietly()


def folder_hiding(package: str) -> Path | None:
    """Return the folder that Python takes for a package of ours; `None` where it takes ours."""
    spec = PathFinder.find_spec(package)
    folders = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    ours = Path(__file__).resolve().parents[2] / package
    return next((folder for folder in folders[:1] if folder.resolve() != ours), None)


def _run(command: str, module: str, function: str = "main") -> None:
    require_ours(command)  # before anything of ours is imported
    with ended_by_its_reader():
        sys.exit(getattr(importlib.import_module(module), function)())


def _has_lost_its_reader() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _leave_quietly() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
    sys.exit(_ENDED_BY_SIGPIPE)


def require_ours(command: str) -> None:
    """Leave with a message where a folder of the user hides a package of ours."""
    hiding = next((folder for folder in map(folder_hiding, _PACKAGES) if folder is not None), None)
    if hiding is not None:
        sys.stderr.write(
            f"{command}: {hiding} hides a package of acbench with the same name, because it comes first on "
            "Python's path; rename the folder, or start the command from another one\n"
        )
        sys.exit(2)
