"""Processes as /proc shows them: whose child one is, and who carries a mark in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "ACBENCH_STARTED_BY"
"""Variable that says who started a process; what that one starts inherits it, in whatever session."""

_KILL_S = 5.0
_POLL_S = 0.01


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`, those that nobody has buried included."""
    return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _parent(stat) == parent]


def end_marked(mark: str) -> None:
    """Kill the processes whose environment has this mark, and what they start meanwhile, for 5 s at most."""
    end_s = time.monotonic() + _KILL_S
    while (found := list(_marked(mark))) and time.monotonic() < end_s:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _parent(stat: Path) -> int | None:
    try:
        return int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except OSError:  # it has ended since
        return None


def _marked(mark: str) -> Iterator[int]:
    """Yield the live processes with this mark; one that has ended shows no environment."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
