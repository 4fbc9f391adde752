"""`acbench -m ac=budget` is typed without a budget, which the command without `-m` refuses.

The sweep had one refused record, and the command ended well.
"""

from __future__ import annotations

from tests.gallery.outside._commands import acbench

BEFORE = "exit 2 alone, exit 0 as a sweep"
RIGHT = "exit 2 alone, exit 2 as a sweep"


def answer() -> str:
    """Return how both commands end."""
    alone, swept = (acbench(*words, "ac=budget", "tracker=none").returncode for words in ((), ("-m",)))
    return f"exit {alone} alone, exit {swept} as a sweep"
