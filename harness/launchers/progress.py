"""Progress of a sweep on stderr: two bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class SweepProgress:
    """A bar over points and one over the steps of the running point.

    Every finished point leaves one line, on a terminal above the bars.

    Args:
        stream: where to write; stderr unless a test asks otherwise.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, emoji=False, soft_wrap=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._points: TaskID | None = None
        self._steps: TaskID | None = None
        self._total = 0
        self._done = 0
        self._started: float | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.stop()

    @property
    def is_live(self) -> bool:
        """True if steps are shown, so that it is worth following them."""
        return self._console.is_terminal

    def start(self, total: int) -> None:
        """Announce how many points will run."""
        self._total = total
        self._points = self._bars.add_task("points", total=total)
        self._steps = self._bars.add_task("", total=None, visible=False)

    def point_started(self, label: str) -> None:
        """Announce the point that runs now."""
        self._started = time.monotonic()
        if self._console.is_terminal and self._steps is not None:
            self._bars.reset(self._steps, description=label, total=None, visible=True)
            return
        self._line(self._done + 1, f"{label} ...")

    def point_waits(self, label: str) -> None:
        """Announce that another command runs this point, whose record this one will take."""
        self._line(self._done + 1, f"{label}: another command runs it, waiting ...")

    def steps(self, done: int, total: int) -> None:
        """Show how far the running point is; nothing where there is no terminal."""
        if self._steps is not None:
            self._bars.update(self._steps, completed=done, total=total)

    def point_finished(self, label: str, status: str, verdict: str) -> None:
        """Report how a point ended; without a duration where it was finished before and never started."""
        self._done += 1
        took = "" if self._started is None else f" ({time.monotonic() - self._started:.1f} s)"
        self._started = None
        self._line(self._done, f"{label}: {status}, {verdict}{took}")
        if self._points is not None and self._steps is not None:
            self._bars.update(self._points, completed=self._done)
            self._bars.update(self._steps, visible=False)

    def _line(self, number: int, text: str) -> None:
        self._console.print(f"[{number}/{self._total}] {text}", markup=False)
