"""A pass that all ranks try at once; the outcome of each rank is known to all before they go on.

A rank that raises outside of collectives leaves the others none to wait in, and all go on by the same answer.
One that raises where the others wait for it in a collective gets no answer. Its error then ends it as in any
other phase of a trial; whoever watches the ranks ends the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.utils.store import synchronize

from harness.errors import ConfigError
from harness.measure.probes.pass_error import PassError, Raised

PATIENCE_S = 60.0
"""How long a rank that has raised waits for the others, which may be some passes behind."""

_KEY = "acbench/tried"

T = TypeVar("T")


class NoRoomError(torch.OutOfMemoryError):
    """One of the ranks is out of memory; all raise this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried(Generic[T]):
    """The outcome of a pass.

    Fields:
        value: what was returned on this rank; `None` where it raised here.
        error: what it raised on this rank; `None` for nothing.
        raised: what it raised on each rank where it did.
    """

    value: T | None = None
    error: Exception | None = None
    raised: tuple[Raised, ...] = ()

    @property
    def has_raised(self) -> bool:
        """True if it raised on any rank."""
        return bool(self.raised)


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
    raised_everywhere = _answers(error, patience_s)
    if any(each.is_too_large for each in raised_everywhere):
        raise NoRoomError(str(error or "out of memory on another rank")) from error
    return Tried(value=value, error=error, raised=raised_everywhere)


def together(work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank.

    Raises:
        NoRoomError: a rank is out of memory.
        Exception: as of `work`.
    """
    returned: list[T] = []
    tried(lambda: returned.append(work()), catching=())
    return returned[0]


class RanksRaised(Exception):  # noqa: N818 (it is what passes raised, not what is wrong)
    """A pass of one of the two models raised, on some of the ranks; all raise this.

    Fields:
        raised: what it raised on each rank where it did.
        error: what it raised on this rank; `None` for nothing.
    """

    def __init__(self, raised: tuple[Raised, ...], error: Exception | None) -> None:
        super().__init__(raised, error)
        self.raised = raised
        self.error = error


def agreed(work: Callable[[], T]) -> T:
    """Return what `work` returns on this rank, where it raises on none.

    Raises:
        RanksRaised: a pass of one of the models raised, on some rank, and nothing else was raised.
        NoRoomError: a rank is out of memory.
        ConfigError: another rank has raised something else; the message says which rank, and what.
        Exception: what `work` raised on this rank.
    """
    returned: list[T] = []
    found = tried(lambda: returned.append(work()), catching=(Exception,))
    if not found.raised:
        return returned[0]
    other = next((each for each in found.raised if each.phase is None), None)
    if other is None:
        raise RanksRaised(found.raised, found.error) from found.error
    if found.error is not None and not isinstance(found.error, PassError):
        raise found.error
    raise ConfigError(f"rank {other.rank}", f"raises {other.said}") from found.error


def _answers(error: Exception | None, patience_s: float) -> tuple[Raised, ...]:
    """Return what each rank has raised, by the store that they met at: no collective is before it.

    Raises:
        Exception: what this rank has raised, where another does not answer.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = None if error is None else Raised.of(error, rank=rank)
    if not dist.is_initialized():
        return () if own is None else (own,)
    store: Any = distributed_c10d._get_default_store()  # noqa: SLF001 (no public name)
    world_size = dist.get_world_size()
    said_here = json.dumps(None if own is None else asdict(own)).encode()
    count = store.add(f"{_KEY}/{rank}", 1)  # all have asked as often
    wait_s = store.timeout.total_seconds() if error is None else patience_s
    try:
        said = synchronize(store, said_here, rank, world_size, f"{_KEY}/{count}/", wait_s)
    except RuntimeError as silence:  # a file store knows no error of its own
        if error is None:
            raise
        raise (error.error if isinstance(error, PassError) else error) from silence
    answers = map(json.loads, said)
    return tuple(Raised(**each) for each in answers if each is not None)
