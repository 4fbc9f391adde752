"""Replacing an attribute of a foreign class or module for the length of a measurement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
