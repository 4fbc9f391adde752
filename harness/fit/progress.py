"""What is done at the moment, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CLEAR = "\r\x1b[K"


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """Give a function that says on stderr what is done next; elsewhere than on a terminal it says nothing."""
    is_shown = sys.stderr.isatty()

    def tell(doing: str) -> None:
        if is_shown:
            sys.stderr.write(f"{_CLEAR}{doing} \N{HORIZONTAL ELLIPSIS}")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if is_shown:
            sys.stderr.write(_CLEAR)
