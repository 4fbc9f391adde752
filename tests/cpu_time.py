"""What each test costs in CPU seconds of this process and its descendants, and what `slow` therefore means.

CPU time, not wall time: a machine that is busy with something else changes it less, by up to a factor of two
where two threads share a core. What fails a run is therefore held against what a fixed piece of work takes on
the same machine right after the test.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SLOW_S = 10.0
"""What a test may take that is not marked `slow`; one that takes less than a quarter of it needs no mark."""
FAILS_S = 3 * SLOW_S
"""What such a test must not take, times `slowness`: beyond it the run fails."""
FIXED_WORK_S = 0.1
"""What the fixed piece of work takes where the limits were set."""
BRIEF_S = 0.002
"""What takes less time counts with what follows: to ask all descendants takes half a millisecond."""
COST = "cost"
"""Property of a report: CPU seconds, whether the test is marked `slow`, and the machine's slowness, which is
measured only after a test that may fail the run."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LONGEST = 1 << 20  # bytes of a file of /proc


class CpuTime:
    """A plugin that measures every test, and fails a run in which `slow` does not say what was measured.

    Args:
        costs: a JSON file for CPU seconds by test file and by test, if any.
    """

    def __init__(self, costs: Path | None = None) -> None:
        self._costs = costs
        self._spent: Counter[str] = Counter()
        self._called: dict[str, float] = {}
        self._slowness: dict[str, float] = {}
        self._slow: set[str] = set()
        self._before_s: defaultdict[int, float] = defaultdict(float)  # by process: a fork has spent nothing

    def pytest_collection_finish(self) -> None:
        self._before_s[os.getpid()] = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        spent_s, times_slower = 0.0, 1.0
        if report.duration > BRIEF_S:
            now_s, process = cpu_s(), os.getpid()
            spent_s, self._before_s[process] = now_s - self._before_s[process], now_s
        if spent_s > FAILS_S:
            times_slower, self._before_s[os.getpid()] = slowness(), cpu_s()
        is_slow = item.get_closest_marker("slow") is not None
        report.user_properties = [(COST, (spent_s, is_slow, times_slower))]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        # a worker that died has measured nothing
        spent_s, is_slow, times_slower = properties.get(COST, (0.0, False, 1.0))
        self._spent[report.nodeid] += spent_s
        if report.when == "call":
            self._called[report.nodeid] = spent_s
            self._slowness[report.nodeid] = times_slower
            if is_slow:
                self._slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._costs is not None:
            self._costs.write_text(json.dumps(self._spent))
        if self.failing() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{sum(self._spent.values()):.0f} CPU seconds in tests")
        for line in self.too_dear():
            terminalreporter.write_line(line, red=True)
        for line in self.failing():
            terminalreporter.write_line(line, red=True)
        for line in self.too_cheap():
            terminalreporter.write_line(line)

    def too_dear(self) -> list[str]:
        """Return what takes longer than `SLOW_S` and is not marked `slow`, as sentences."""
        return [
            f"{test}: took {spent_s:.1f} CPU seconds; mark it slow or make it cheaper"
            for test, spent_s in sorted(self._called.items())
            if spent_s > SLOW_S and test not in self._slow
        ]

    def failing(self) -> list[str]:
        """Return what takes longer than `FAILS_S` times the slowness of the machine too, as sentences."""
        return [
            f"{test}: fails the run; its limit here is {FAILS_S * self._slowness[test]:.0f} CPU seconds"
            for test, spent_s in sorted(self._called.items())
            if spent_s > FAILS_S * self._slowness[test] and test not in self._slow
        ]

    def too_cheap(self) -> list[str]:
        """Return what is marked `slow` and need not be, as sentences."""
        return [
            f"{test}: took {self._called[test]:.1f} CPU seconds; it is not slow"
            for test in sorted(self._slow)
            if self._called[test] < SLOW_S / 4
        ]


def cpu_s() -> float:
    """Return the CPU seconds of this process, of descendants that it waited for, and of those that live."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited.ru_utime + waited.ru_stime + sum(map(_tree_s, _children(os.getpid())))


def slowness() -> float:
    """Return how many times longer than `FIXED_WORK_S` a fixed piece of work takes now; at least 1."""
    before_s = time.process_time()
    sum(number * number for number in range(2_000_000))
    return max(1.0, (time.process_time() - before_s) / FIXED_WORK_S)


def _tree_s(process: int) -> float:
    try:
        fields = _read(f"/proc/{process}/stat").rpartition(b")")[2].split()
    except OSError:  # it has ended
        return 0.0
    own_s = sum(map(int, fields[11:15])) / _TICKS_PER_S  # user and system, its own and of what it waited for
    return own_s + sum(map(_tree_s, _children(process)))


def _children(process: int) -> list[int]:
    """Return what the first thread of a process has started and not waited for."""
    try:
        return [int(child) for child in _read(f"/proc/{process}/task/{process}/children").split()]
    except OSError:
        return []


def _read(path: str) -> bytes:
    """Return a file of /proc, of every process three times a test; `Path` takes three times as long."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _LONGEST)
    finally:
        os.close(file)
