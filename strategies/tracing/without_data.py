"""The one message about code that cannot be followed without data."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack, walk_tb

import torch

from strategies.base import StrategyError

_NOT_THEIRS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    "<",
)


@contextmanager
def following(what: Callable[[], str]) -> Iterator[None]:
    """Say in one message what could not be followed without data.

    Args:
        what: names the module that was running.

    Raises:
        StrategyError: torch has refused to go on.
    """
    try:
        yield
    except StrategyError:
        raise
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
    ) as error:  # what torch raises of tensors without data
        reason = str(error).strip().partition("\n")[0]
        raise StrategyError("ac", f"{what()} cannot be followed without data: {reason}") from error


@contextmanager
def models_errors(problem: str, remedy: str) -> Iterator[None]:
    """Refuse what a model raises while it is followed without data, which may be anything.

    Args:
        problem: what was done, up to the word before the error.

    Raises:
        StrategyError: the model has raised.
    """
    try:
        yield
    except StrategyError:
        raise
    except Exception as error:
        raise StrategyError("ac", f"{problem} {words_of(error)}; {remedy}") from error


def words_of(error: Exception) -> str:
    """Return `RuntimeError: ` and the first line of what it says; nothing of one that cannot be asked."""
    try:
        said = str(error).partition("\n")[0]
    except Exception:  # noqa: BLE001 (the user's own error, whose text may raise anything)
        said = "(its text cannot be read)"
    return f"{type(error).__name__}: {said}"


def line_of(error: Exception | None = None) -> str:
    """Return `" in FILE:LINE"`, where the user's code calls torch; `error` was raised there."""
    walked = walk_stack(None) if error is None else reversed(list(walk_tb(error.__traceback__)))
    places = ((frame.f_code.co_filename, line) for frame, line in walked)
    found = next((place for place in places if not place[0].startswith(_NOT_THEIRS)), None)
    return "" if found is None else f" in {Path(found[0]).name}:{found[1]}"
