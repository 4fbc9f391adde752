"""Progress of the planner on stderr, while the user waits for it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_MANY = 1000
"""Items above which each step of planning is told from its begin."""

PAUSE_S = 1.0
"""Seconds between two lines; planning that takes less prints nothing."""


class _Seldom(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._due = time.monotonic() + PAUSE_S

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: ARG002 (every line counts the same)
        """Let a line pass when the last one is `PAUSE_S` ago."""
        return self.is_due()

    def is_due(self) -> bool:
        """Return whether the last line is `PAUSE_S` ago; then the next one is now."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + PAUSE_S
        return True


def told(items: Sequence[T], verb: str, noun: str) -> Iterator[T]:
    """Yield `items`; of many it is said on stderr that they are looked at, and how far that is.

    Args:
        verb: what is done with them, `checking`.
        noun: what they are, in the plural.
    """
    if len(items) <= _MANY:
        yield from items
        return
    seldom = _Seldom()
    for count, item in enumerate(items):
        if not count or seldom.is_due():
            sys.stderr.write(f"acbench: {verb} {len(items):,} {noun}{f', {count:,} done' if count else ''}\n")
        yield item


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
