"""Marking of host memory: how a meter tells offloaded copies from device memory where both are CPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_allocating: ContextVar[bool] = ContextVar("allocating_on_host", default=False)


@contextmanager
def host_allocation() -> Iterator[None]:
    """Mark every allocation made inside as host memory of an offloading strategy."""
    token = _allocating.set(True)
    try:
        yield
    finally:
        _allocating.reset(token)


def allocating_on_host() -> bool:
    """Return whether the current thread of control allocates host memory for offloading."""
    return _allocating.get()
