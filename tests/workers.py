"""`--workers N`: forks of the process that has imported and collected all run the tests, a file at a time.

Workers that collect by themselves import torch, transformers and all tests once each. Between two files a
worker takes down what the file and its folders have set up, never what stands for the session.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from harness.ranks.forkserver import die_with


@dataclass(slots=True)
class _Worker:
    """A fork, the tests of its file that have not begun, and the last one that has."""

    pid: int
    waiting: deque[int] = field(default_factory=deque)
    begun: int | None = None


class Workers:
    """A plugin that lets forks run all tests, in the order of their files.

    Args:
        number: how many run at a time.
        begins: called by each of them before its first test.
    """

    def __init__(self, number: int, begins: Callable[[pytest.Config], None] = lambda _config: None) -> None:
        self._begins = begins
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask CUDA breaks it in later forks
        self._number = number
        self._names = count()
        self._workers: dict[Connection, _Worker] = {}
        self._files: deque[deque[int]] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None  # as without workers
        self._files.extend(map(deque, _by_file(session.items)))
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False  # results of several files come in turns
        try:
            for _ in range(min(self._number, len(self._files))):
                self._start(session)
            while self._workers:
                for connection in wait(list(self._workers)):
                    assert isinstance(connection, Connection)
                    self._attend(session, connection)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _start(self, session: pytest.Session) -> None:
        ours, theirs = Pipe()
        name, parent = f"w{next(self._names)}", os.getpid()
        folder = session.config._tmp_path_factory.mktemp(name, numbered=False)  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with(parent, signal.SIGKILL)
                for connection in (ours, *self._workers):
                    connection.close()
                _serve(session, theirs, folder, self._begins)
                code = 0
            except BaseException:  # noqa: BLE001 (the end of a process)
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        self._workers[ours] = _Worker(pid)

    def _attend(self, session: pytest.Session, connection: Connection) -> None:
        """Take one message of a worker: that it wants work, that a test begins, or a report."""
        worker, hook = self._workers[connection], session.config.hook
        try:
            message = connection.recv()
        except (EOFError, ConnectionError):
            self._bury(session, connection)
            return
        if message is None:
            worker.waiting = self._files.popleft() if self._files else deque()
            connection.send(list(worker.waiting))
        elif isinstance(message, int):
            worker.begun = worker.waiting.popleft()
        else:
            report = hook.pytest_report_from_serializable(config=session.config, data=message)
            hook.pytest_runtest_logreport(report=report)

    def _bury(self, session: pytest.Session, connection: Connection) -> None:
        """Report the test that a worker died in, and let another one run the rest of the file."""
        worker = self._workers.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if code == 0:
            return
        if worker.begun is None:
            raise RuntimeError(f"a worker ended with {code} before its first test")
        item = session.items[worker.begun]
        session.config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"its process ended with {code}",
                when="call",
            )
        )
        if worker.waiting:
            self._files.appendleft(worker.waiting)
        if self._files:
            self._start(session)


class _Sends:
    """A plugin of a worker: reports go to the process that started it, and no other plugin hears of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            hook = item.config.hook
            self._connection.send(hook.pytest_report_to_serializable(config=item.config, report=report))
        return True


class _AnotherFile:
    """What follows the last test of a file: a test of which nothing is known but its session."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[Any]:
        return [self._session]


def _serve(
    session: pytest.Session, connection: Connection, folder: Path, begins: Callable[[pytest.Config], None]
) -> None:
    """Run what the other side of a connection says until it says nothing more."""
    config = session.config
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of all processes
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(_Sends(connection))
    begins(config)
    for number, following in _numbers(connection):
        connection.send(number)
        item = session.items[number]
        after = _AnotherFile(session) if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=item, nextitem=after)
    session._setupstate.teardown_exact(None)


def _numbers(connection: Connection) -> Iterator[tuple[int, int | None]]:
    """Yield the numbers of tests to run, each with that of the next one of its file."""
    while True:
        connection.send(None)
        numbers = connection.recv()
        if not numbers:
            return
        yield from zip(numbers, [*numbers[1:], None], strict=True)


def _by_file(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Return the numbers of tests by file, in the order of the first of each."""
    found: dict[Path, list[int]] = {}
    for number, item in enumerate(items):
        found.setdefault(item.path, []).append(number)
    return list(found.values())
