"""Ctrl-C: the first ends the sweep after the running points, the second ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Self


class Interrupts:
    """Counts Ctrl-C while it is entered.

    Args:
        is_patient: whether the first Ctrl-C only requests a stop; otherwise it raises `KeyboardInterrupt`.

    Attributes:
        stop_requested: whether the first Ctrl-C has come.
    """

    def __init__(self, *, is_patient: bool) -> None:
        self.stop_requested = False
        self._is_patient = is_patient

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only it may have handlers
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.stop_requested or not self._is_patient:
            raise KeyboardInterrupt
        self.stop_requested = True
        sys.stderr.write("acbench: stopping after the running points; Ctrl-C again stops at once\n")
