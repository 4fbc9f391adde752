"""Replacing an attribute of a foreign class or module for the length of a measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set `owner.name` to `value` inside the scope and put back exactly what was there.

    An attribute that `owner` only inherited is deleted again, so that nothing of the measurement stays.
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Inside the scope, a call of `owner.name` calls `around` with the original and then the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    with replaced(owner, name, call):
        yield


class Wrappings:
    """Attributes that a measurement has wrapped, and can put back for the length of a call."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Any, str, Callable[..., Any]]] = []
        self._made = ExitStack()

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Wrap `owner.name` as `wrapped` does, until `close`."""
        self._wanted.append((owner, name, around))
        self._made.enter_context(wrapped(owner, name, around))

    def close(self) -> None:
        """Put back everything."""
        self._wanted.clear()
        self._made.close()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Put back everything inside the scope."""
        self._made.close()
        try:
            yield
        finally:
            for owner, name, around in self._wanted:
                self._made.enter_context(wrapped(owner, name, around))
