"""The live ranks of one trial on one node: started, watched, ended.

The ranks may end by themselves, because one of them failed, or because the trial is halted. None is alive
afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.ranks.culprit import is_waiting, place_of
from harness.ranks.forkserver import ForkServer, ForkServerError
from harness.ranks.node_report import Death, Halt
from harness.ranks.rank_report import RankReport, log_path, read_reports
from harness.ranks.start import STACK_SIGNAL, RankStart
from harness.records.files import shorten

Watch = Callable[[Mapping[int, RankReport]], None]
HaltCheck = Callable[[], Halt | None]

_POLL_S = 0.25
_SHORT_POLL_S = 0.02
_GRACE_S = 0.5
_LATE_S = 2.0
_TERMINATE_S = 1.0
_KILL_S = 5.0
_STACK_BYTES = 64 * 1024
_MOST_OF_A_LOG = 64 * 2**20
_SENT_TO_ALL = (-signal.SIGTERM, -signal.SIGUSR2)
_FROM_OUTSIDE = ("terminated", "time_limit")


class LiveRanks:
    """The ranks of one node.

    Args:
        trial_dir: folder of their reports and logs.
        world_size: number of ranks of the whole trial; reports of higher ranks are left from an earlier one.

    Attributes:
        deaths: deaths so far, in order of time.
        waiting: ranks that were in a collective when the halt came.
        places: where ranks were then, a phrase for each that said so.
        ended_s: time at which the ranks had ended or the halt came, in seconds of `time.time`.
    """

    def __init__(self, server: ForkServer, trial_dir: Path, world_size: int) -> None:
        self.deaths: list[Death] = []
        self.waiting: list[int] = []
        self.places: list[str] = []
        self.ended_s = time.time()
        self._server = server
        self._trial_dir = trial_dir
        self._world_size = world_size
        self._live: dict[int, int] = {}  # process id -> rank
        self._left_out: Counter[int] = Counter()  # bytes of the log by rank

    def start(self, starts: Sequence[RankStart]) -> None:
        """Start the ranks."""
        for start in starts:
            self._live[self._server.start("harness.ranks.entry:main", start)] = start.rank

    def follow(self, deadline_s: float, watch: Watch | None, halt: HaltCheck) -> Halt | None:
        """Wait until no rank is alive; return the halt, or `None` if the ranks ended or failed by themselves.

        Args:
            deadline_s: longest time in seconds from now to the last end.
            watch: called four times a second with the reports so far.
            halt: called as often; returns why the ranks must end, or `None`.
        """
        end_s = time.monotonic() + deadline_s
        while self._live:
            self._attend(min(_POLL_S, end_s - time.monotonic()))
            if watch is not None:
                watch(self._reports())
            found = halt() if self._live else self._late(halt)
            if found is None and self._live and time.monotonic() >= end_s:
                found = Halt(kind="deadline", message=f"no result within {deadline_s:g} s")
            if found is not None:
                self._stop(found)
                return found
        self.ended_s = time.time()
        return None

    def _attend(self, timeout_s: float) -> None:
        """Wait for a death; after the first without a result, end the other ranks."""
        death = self._await_death(timeout_s)
        for rank in self._live.values():
            self._shorten_log(rank)
        if death is not None and not self._has_result(death.rank):
            self._await_all(_GRACE_S)
            self._end()

    def _late(self, halt: HaltCheck) -> Halt | None:
        is_sent_to_all = any(death.code in _SENT_TO_ALL and not death.ended for death in self.deaths)
        return late_halt(halt) if is_sent_to_all else None

    def _stop(self, halt: Halt) -> None:
        """End the ranks, after they have written their stacks unless the agent itself must go."""
        if halt.kind == "peer":
            self._await_all(_GRACE_S)  # a rank that lost its peer may still report it
        self.ended_s = time.time()
        if halt.kind != "terminated":
            self._ask_for_stacks()
        self._end()

    def _has_result(self, rank: int) -> bool:
        """Return whether `rank` has left a result; its process may end in any way after that."""
        report = self._reports().get(rank)
        return report is not None and report.state == "ok"

    def _reports(self) -> dict[int, RankReport]:
        reports = read_reports(self._trial_dir)
        return {rank: report for rank, report in reports.items() if rank < self._world_size}

    def _ask_for_stacks(self) -> None:
        """Learn which ranks wait in a collective, and where each is, by the stacks that they write now."""
        self._signal_all(STACK_SIGNAL)
        self._await_all(_GRACE_S, ended=True)  # one that has not installed its handler yet says nothing
        stacks = {rank: _read_end(log_path(self._trial_dir, rank)) for rank in sorted(self._live.values())}
        self.waiting = [rank for rank, stack in stacks.items() if is_waiting(stack)]
        places = {rank: place_of(stack) for rank, stack in stacks.items()}
        self.places = [f"rank {rank} {place}" for rank, place in places.items() if place]

    def _end(self) -> None:
        for number, patience_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
            self._signal_all(number)
            self._await_all(patience_s, ended=True)
        if self._live:
            raise ForkServerError(f"ranks {sorted(self._live.values())} survived SIGKILL for {_KILL_S:g} s")

    def _signal_all(self, number: int) -> None:
        for pid in self._live:
            self._server.signal(pid, number)

    def _await_all(self, patience_s: float, *, ended: bool = False) -> None:
        end_s = time.monotonic() + patience_s
        while self._live and (left_s := end_s - time.monotonic()) > 0:
            self._await_death(left_s, ended=ended)

    def _await_death(self, timeout_s: float, *, ended: bool = False) -> Death | None:
        """Return the next death within `timeout_s`, and keep it; `None` where nobody dies."""
        died = self._server.next_death(max(timeout_s, 0))
        if died is None:
            return None
        death = Death(
            rank=self._live.pop(died.pid),
            code=died.code,
            time=died.time,
            ended=ended,
            kind=died.kind,
            message=died.message,
        )
        self.deaths.append(death)
        self._shorten_log(death.rank)
        return death

    def _shorten_log(self, rank: int) -> None:
        """Keep head and tail of a log that has grown too long, and say in it what is left out."""
        path, before = log_path(self._trial_dir, rank), self._left_out[rank]

        def note(cut: int) -> str:
            limit = f"a log has at most {_MOST_OF_A_LOG >> 20} MiB"
            return f"\n[acbench: {limit}; {before + cut:,} bytes left out]\n"

        with contextlib.suppress(OSError):  # it is gone, or the disk is full
            self._left_out[rank] += shorten(
                path, most_bytes=_MOST_OF_A_LOG, note=note, within=self._trial_dir.parent
            )


def late_halt(halt: HaltCheck) -> Halt | None:
    """Wait up to 2 s for a halt from outside, and return it, or `None`.

    Schedulers send a signal to every process, and a rank may die of it before the agent has received it.
    """
    end_s = time.monotonic() + _LATE_S
    while (found := halt()) is None and time.monotonic() < end_s:
        time.sleep(_SHORT_POLL_S)
    return found if found is not None and found.kind in _FROM_OUTSIDE else None


def _read_end(path: Path) -> str:
    """Return the last 64 KiB of a log, which hold a stack that was just written."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _STACK_BYTES, 0))
        return file.read().decode("utf-8", errors="replace")
