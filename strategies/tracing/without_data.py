"""What cannot be followed without data is said in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strategies.base import StrategyError


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
