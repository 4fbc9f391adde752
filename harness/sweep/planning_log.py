"""What planning has come to, on stderr while somebody waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

PAUSE_S = 1.0
"""Time between two lines; a plan that is ready sooner says nothing."""


class _Seldom(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._due = time.monotonic() + PAUSE_S

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 (every line counts the same)
        """Let a line pass where the last one is long ago."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + PAUSE_S
        return True


@contextmanager
def planning_shown() -> Iterator[None]:
    """Write what strategies tell of their planning to stderr."""
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
