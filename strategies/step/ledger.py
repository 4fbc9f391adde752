"""The life of every storage of a step, written down as it happens and added up afterwards.

What a storage *was* (an activation, a gradient, an unsharded parameter) is often known only later than
when it was made. A ledger of births, resizings and deaths lets every total be taken with that knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple


class Kind(Enum):
    """The kind of what a storage holds."""

    STANDING = auto()  # there before the step: parameters, buffers, optimizer state, inputs
    CREATED = auto()  # made by an operator of the step
    PARAMETER = auto()  # made by the step to hold a parameter: FSDP's unsharded ones
    GRADIENT = auto()  # the gradient of a parameter
    OUTPUT = auto()  # returned by the forward pass, or the loss
    WORKSPACE = auto()  # private to a kernel, gone when it returns
    BACKEND = auto()  # private to a communication backend


@dataclass(kw_only=True, slots=True)
class Life:
    """One storage from birth to death.

    Fields:
        nbytes: its size now; 0 once it is dead.
        phase, module, op, source: where it was made, `source` as `file:line`; `phase` is empty for what stood
            before the step.
        shape, dtype: those of the tensor that made it known.
        on_host: whether it lies in host memory while the model computes elsewhere.
    """

    nbytes: int
    kind: Kind
    on_host: bool = False
    op: str = ""
    module: str = ""
    source: str = ""
    phase: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Peak(NamedTuple):
    """The highest total of a selection of storages, and where it was first reached."""

    nbytes: int
    phase: str
    module: str


class SizeChange(NamedTuple):
    """A storage is made, gets another size, or dies. `delta`: bytes by which it grows."""

    life: int
    delta: int
    phase: str
    module: str


@dataclass(slots=True)
class Ledger:
    """Storage lives by number, in order of birth, and the changes of their sizes in order of time."""

    lives: list[Life] = field(default_factory=list)
    changes: list[SizeChange] = field(default_factory=list)

    def add_standing(self, life: Life) -> int:
        """Enter a storage that was there before the step, however late it is known; return its number."""
        self.lives.append(life)
        return len(self.lives) - 1

    def add(self, life: Life) -> int:
        """Enter a storage that an operator has just made; return its number."""
        number = self.add_standing(life)
        self.changes.append(SizeChange(number, life.nbytes, life.phase, life.module))
        return number

    def resize(self, number: int, nbytes: int, *, phase: str, module: str) -> None:
        """Note that a storage has another size from now on; 0 is its death."""
        life = self.lives[number]
        if nbytes != life.nbytes:
            self.changes.append(SizeChange(number, nbytes - life.nbytes, phase, module))
            life.nbytes = nbytes

    def mark_time(self, number: int) -> int:
        """Enter a moment of a storage at which no size changes; return it: what follows is later."""
        life = self.lives[number]
        self.changes.append(SizeChange(number, 0, life.phase, life.module))
        return self.moment - 1

    @property
    def moment(self) -> int:
        """The number of changes so far."""
        return len(self.changes)

    def total(self, selected: Callable[[Life], bool]) -> int:
        """Return the bytes of the selected storages now."""
        return sum(life.nbytes for life in self.lives if selected(life))

    def start_bytes(self, selected: Callable[[Life], bool]) -> int:
        """Return the bytes of the selected storages before the first change."""
        changed = sum(change.delta for change in self.changes if selected(self.lives[change.life]))
        return self.total(selected) - changed

    def peak(self, selected: Callable[[Life], bool]) -> Peak:
        """Return the highest total of the selected storages; a tie is the earliest."""
        chosen = [selected(life) for life in self.lives]
        changes = (change for change in self.changes if chosen[change.life])
        return highest(self.start_bytes(selected), changes)[0]

    def largest(self, selected: Callable[[Life], bool]) -> dict[str, int]:
        """Return the largest birth of a selected storage by the operator that made it, largest first."""
        largest: dict[str, int] = {}
        for change in self.changes:
            life = self.lives[change.life]
            if selected(life):
                largest[life.op] = max(largest.get(life.op, 0), change.delta)
        return dict(sorted(largest.items(), key=lambda item: -item[1]))

    def mark(self, numbers: Iterable[int], kind: Kind) -> None:
        """Say what storages turned out to be; what stood before the step is no result of it."""
        for number in numbers:
            if self.lives[number].kind is not Kind.STANDING or kind is Kind.BACKEND:
                self.lives[number].kind = kind


def is_saved(life: Life) -> bool:
    """Tell whether a storage that lives at the end of forward counts as saved for backward."""
    return life.phase == "forward" and life.kind is Kind.CREATED and not life.on_host and life.nbytes > 0


def is_activation(life: Life) -> bool:
    """Tell whether a storage counts as an activation of forward or backward."""
    return (
        life.phase in ("forward", "backward")
        and life.kind in (Kind.CREATED, Kind.OUTPUT)
        and not life.on_host
    )


def is_on_device(life: Life) -> bool:
    """Tell whether a storage of the step lies on the device."""
    return not life.on_host and is_storage(life)


def is_on_host(life: Life) -> bool:
    """Tell whether a storage lies in host memory while the model computes elsewhere."""
    return life.on_host and is_storage(life)


def is_storage(life: Life) -> bool:
    """Tell storages from the private memory of kernels and of communication backends."""
    return life.kind not in (Kind.WORKSPACE, Kind.BACKEND)


def highest(start_bytes: int, changes: Iterable[Any]) -> tuple[Peak, int]:
    """Return the highest total, the earliest of equal ones, and the number of changes until then.

    Args:
        changes: each with its `delta` in bytes, `phase` and `module`.
    """
    running, until = start_bytes, 0
    peak = Peak(start_bytes, "forward", "(model)")
    for number, change in enumerate(changes, start=1):
        running += change.delta
        if running > peak.nbytes:
            peak, until = Peak(running, change.phase, change.module), number
    return peak, until
