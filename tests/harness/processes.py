"""What tests see of processes: whether ranks have begun, whether one waits, whether all are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from harness.process_tree import children_of
from harness.ranks.culprit import is_waiting
from harness.ranks.node_report import Halt
from harness.ranks.rank_report import log_path, read_reports

_PATIENCE_S = 120.0


def require_dead(*pids: int) -> None:
    """Wait until none of `pids` runs; fail where one does not end."""
    end_s = time.monotonic() + _PATIENCE_S
    alive = set(pids)
    while alive and time.monotonic() < end_s:
        alive = {pid for pid in alive if is_alive(pid)}
        time.sleep(0.02)
    assert alive == set()


def is_alive(pid: int) -> bool:
    """Return whether `pid` runs; a zombie that nobody has buried yet does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def below(pid: int) -> Iterator[int]:
    """Yield the processes below `pid`."""
    for child in children_of(pid):
        yield child
        yield from below(child)


def has_begun(folder: Path, *ranks: int) -> bool:
    """Return whether all of `ranks` are in phase `parity`, where they fail."""
    reports = read_reports(folder)
    return all(rank in reports and reports[rank].phase == "parity" for rank in ranks)


class Waiter:
    """Wants a halt of two ranks when the stack of one says that it waits in a collective.

    Args:
        rank: which; it has noted its process id.
        wanted: the halt.
    """

    def __init__(self, folder: Path, rank: int, wanted: Halt) -> None:
        self._folder = folder
        self._rank = rank
        self._wanted = wanted

    def halt(self) -> Halt | None:
        if not has_begun(self._folder, 0, 1):
            return None
        if is_waiting(log_path(self._folder, self._rank).read_text("utf-8")):
            return self._wanted
        with contextlib.suppress(ProcessLookupError):  # another agent has ended it already
            os.kill(int((self._folder / f"pid{self._rank}").read_text("utf-8")), signal.SIGUSR2)
        return None
