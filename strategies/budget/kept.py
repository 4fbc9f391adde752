"""Somebody who keeps what planning finds, so that equal questions are answered once.

Predictions plan for a step on fake tensors, trials for the same one with data, each in a process of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np


class Keeper(Protocol):
    """Keeps JSON values by name, for processes of the same sources and packages."""

    def read(self, name: str) -> Any:
        """Return what was written under a name; `None` where nothing was, or it cannot be read."""

    def write(self, name: str, found: Any) -> None:
        """Keep JSON values under a name, where that is possible."""


_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def kept_by(keeper: Keeper) -> Iterator[None]:
    """Let a keeper have what is found within the scope, and say what it knows.

    Args:
        keeper: the keeper.
    """
    token = _keeper.set(keeper)
    try:
        yield
    finally:
        _keeper.reset(token)


class Answers:
    """The answers to questions about one thing.

    Args:
        question: what the answers follow from: numbers, texts, arrays, collections and dataclasses of them.
    """

    def __init__(self, *question: Any) -> None:
        self._keeper = _keeper.get()
        self._key = "" if self._keeper is None else _digest(question)

    def read(self, name: str) -> Any:
        """Return an answer as JSON values, `None` where nobody knows it."""
        return None if self._keeper is None else self._keeper.read(f"{self._key} {name}")

    def write(self, name: str, found: Any) -> None:
        """Keep an answer, as JSON values."""
        if self._keeper is not None:
            self._keeper.write(f"{self._key} {name}", found)

    @contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Keep under one name all that is found within the scope."""
        if self._keeper is None:
            yield
            return
        held = self.read(name)
        notes = _Notes(found=dict(held) if isinstance(held, dict) else {})
        with kept_by(notes):
            yield
        if notes.is_more:
            self.write(name, notes.found)


@dataclass(kw_only=True, slots=True)
class _Notes:
    """Answers by name, and whether one was added."""

    found: dict[str, Any]
    is_more: bool = False

    def read(self, name: str) -> Any:
        """Return what was noted under a name, `None` where nothing was."""
        return self.found.get(name)

    def write(self, name: str, found: Any) -> None:
        """Note an answer."""
        self.found[name], self.is_more = found, True


def _digest(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def _canonical(value: Any) -> str:
    """Return text that two values share where they are equal, with all of their fields.

    Raises:
        TypeError: a value is none of those that have such a text.
    """
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case list() | tuple():
            return f"[{','.join(map(_canonical, value))}]"
        case AbstractSet():
            return f"{{{','.join(sorted(map(_canonical, value)))}}}"
        case Mapping():
            return f"{{{','.join(f'{_canonical(key)}:{_canonical(of)}' for key, of in value.items())}}}"
        case np.ndarray():
            return f"{value.dtype.str}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    if not is_dataclass(value):
        raise TypeError(f"no canonical text of a {type(value).__name__}")
    return f"({','.join(_canonical(getattr(value, each.name)) for each in fields(value))})"
