"""Marking of recomputation that autograd does not record: how a meter tells it from backward itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_recomputing: ContextVar[bool] = ContextVar("recomputing_unrecorded", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark every operator run inside as one of forward that runs again."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def is_marked() -> bool:
    """Return whether the current thread of control recomputes without recording."""
    return _recomputing.get()
