"""The words of an exception, whatever its own code does while it is asked."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

_KIND_CHARS = 200
_MESSAGE_CHARS = 4000
_TRACEBACK_CHARS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """The text that is kept of an exception; any file takes it.

    Fields:
        message: its text, at most 4000 characters of it.
        traceback: the end of its traceback, at most 100 000 characters.
    """

    kind: str
    message: str
    traceback: str


def last_words(error: BaseException) -> LastWords:
    """Return what `error` says; a `__str__` that raises is part of it, half characters are spelled out."""
    return LastWords(
        kind=_told(lambda: type(error).__name__)[:_KIND_CHARS],
        message=_told(lambda: str(error))[:_MESSAGE_CHARS],
        traceback=_told(lambda: "".join(traceback.format_exception(error)))[-_TRACEBACK_CHARS:],
    )


def refuses_hooks(error: RuntimeError) -> bool:
    """Return whether torch.func has refused hooks on saved tensors; torch has no type for that."""
    return "don't yet support saved tensor hooks" in last_words(error).message


def _told(ask: Callable[[], str]) -> str:
    try:
        text = ask()
    except BaseException as second:  # noqa: BLE001 (the user's code; the first error is what counts)
        return f"(its text cannot be had: {type(second).__name__})"
    return text.encode("utf-8", errors="backslashreplace").decode()
