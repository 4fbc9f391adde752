"""Progress: on a terminal one line that changes, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CLEAR = "\r\x1b[K"
_EVERY_S = 2.0
"""Seconds between two lines of a log; what is done sooner has none."""


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Give a function that says on stderr what is done next."""
    is_terminal = sys.stderr.isatty()
    told_at = time.monotonic()

    def tell(doing: str) -> None:
        nonlocal told_at
        now = time.monotonic()
        if is_terminal:
            sys.stderr.write(f"{_CLEAR}{doing} \N{HORIZONTAL ELLIPSIS}")
        elif now - told_at >= _EVERY_S:
            sys.stderr.write(f"{doing} \N{HORIZONTAL ELLIPSIS}\n")
            told_at = now
        sys.stderr.flush()

    try:
        yield tell
    finally:
        if is_terminal:
            sys.stderr.write(_CLEAR)
