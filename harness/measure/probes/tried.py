"""What all ranks try at once: how it went on each of them is known to all before they go on.

A rank that raises outside of collectives leaves the others none to wait in, and all go on by the same answer.
One that raises where the others wait for it in a collective gets no answer. Its error then ends it as in any
other phase of a trial; whoever watches the ranks ends the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.utils.store import synchronize

from harness.measure.probes.pass_error import PassError

PATIENCE_S = 60.0
"""How long a rank that has raised waits for the others, which may be some passes behind."""

_KEY = "acbench/tried"
_DONE, _RAISED, _TOO_LARGE = b"done", b"raised", b"too large"

T = TypeVar("T")


class NoRoomError(torch.OutOfMemoryError):
    """One of the ranks is out of memory; all raise this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried(Generic[T]):
    """How it went.

    Fields:
        value: what was returned on this rank; `None` where it raised here.
        error: what it raised on this rank; `None` for nothing.
        has_raised: whether it raised on any rank.
    """

    value: T | None = None
    error: Exception | None = None
    has_raised: bool = False


def tried(
    work: Callable[[], T],
    *,
    catching: tuple[type[Exception], ...] = (PassError,),
    patience_s: float = PATIENCE_S,
) -> Tried[T]:
    """Return how `work` goes, which all ranks of a process group try at once.

    Args:
        work: what is tried; its collectives are those of all ranks.
        catching: errors that are an answer.
        patience_s: how long a rank that has raised waits for the others, in seconds.

    Raises:
        NoRoomError: a rank is out of memory.
        Exception: what `work` raised on this rank, where it is no answer or the others wait in a collective.
    """
    expected: tuple[type[Exception], ...] = (torch.OutOfMemoryError, *catching)
    value: T | None = None
    error: Exception | None = None
    try:
        value = work()
    except MemoryError:
        raise
    except expected as raised:
        error = raised
    answers = _answers(error, patience_s)
    if _TOO_LARGE in answers:
        raise NoRoomError(str(error or "out of memory on another rank")) from error
    return Tried(value=value, error=error, has_raised=_RAISED in answers)


def together(work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank.

    Raises:
        NoRoomError: a rank is out of memory.
        Exception: as of `work`.
    """
    returned: list[T] = []
    tried(lambda: returned.append(work()), catching=())
    return returned[0]


def _answers(error: Exception | None, patience_s: float) -> list[bytes]:
    """Return how it went on each rank, by the store that they met at, which no collective stands in front of.

    Raises:
        Exception: what this rank has raised, where another does not answer.
    """
    own = _RAISED if error is not None else _DONE
    if isinstance(error, torch.OutOfMemoryError):
        own = _TOO_LARGE
    if not dist.is_initialized():
        return [own]
    store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (no public name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    count = store.add(f"{_KEY}/{rank}", 1)  # all have asked as often
    wait_s = store.timeout.total_seconds() if error is None else patience_s
    try:
        return synchronize(store, own, rank, world_size, f"{_KEY}/{count}/", wait_s)
    except RuntimeError as silence:  # a file store knows no error of its own
        if error is None:
            raise
        raise (error.error if isinstance(error, PassError) else error) from silence
