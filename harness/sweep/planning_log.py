"""Progress of the planner on stderr, while the user waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE_S = 1.0
"""Seconds between two lines; planning that takes less prints nothing."""


class _Seldom(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._due = time.monotonic() + PAUSE_S

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 (every line counts the same)
        """Let a line pass when the last one is `PAUSE_S` ago."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + PAUSE_S
        return True


@contextmanager
def planning_shown() -> Iterator[None]:
    """Write the log messages of strategies to stderr."""
    logger = logging.getLogger("strategies")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("acbench: planning %(message)s"))
    handler.addFilter(_Seldom())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
