"""Python's and NumPy's generators of random numbers, read anew only where somebody has drawn.

Both give their state as a copy of 624 words, which takes longer than many blocks. Their memory tells in less
than a microsecond whether it moved: whoever draws, moves it. It is believed where it is seen to hold the
state that was given, and no second normal number waits beside it.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_WORDS = 625
"""624 words of a Mersenne twister and its position."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """One of the two generators.

    Fields:
        read, write: its state.
        memory: what it has in memory; `None` where that is unknown.
        of_state: memory of a state; `None` where more than that belongs to it.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    memory: Callable[[], bytes | None]
    of_state: Callable[[Any], bytes | None]


@dataclass(frozen=True, slots=True, eq=False)
class DrawnState:
    """A state of one generator.

    Fields:
        kind: the generator.
        state: as it gives it.
        memory: its memory then; `None` where that does not tell.
    """

    kind: _Kind
    state: Any
    memory: bytes | None

    @classmethod
    def of(cls, kind: _Kind) -> DrawnState:
        """Return the state that `kind` is in."""
        memory, state = kind.memory(), kind.read()
        return cls(kind, state, memory if memory == kind.of_state(state) else None)

    def is_current(self) -> bool:
        """Say whether the generator is known to be in this state."""
        return self.memory is not None and self.memory == self.kind.memory()

    def put(self) -> None:
        """Put the generator into this state."""
        if not self.is_current():
            self.kind.write(self.state)


class NumberGenerators:
    """Reads both generators; a state that is still there is read once."""

    def __init__(self) -> None:
        self._latest: tuple[DrawnState, ...] = ()

    def states(self) -> tuple[DrawnState, ...]:
        """Return the states that both are in."""
        if not self._latest:
            self._latest = tuple(map(DrawnState.of, _KINDS))
        elif not all(each.is_current() for each in self._latest):
            self._latest = tuple(
                each if each.is_current() else DrawnState.of(each.kind) for each in self._latest
            )
        return self._latest


def _memory_of_python() -> bytes | None:
    generator = random._inst  # type: ignore[attr-defined]  # noqa: SLF001 (that of random.random)
    begin = object.__basicsize__
    if type(generator) is not random.Random or random.Random.__basicsize__ < begin + 4 * _WORDS:
        return None
    return ctypes.string_at(id(generator) + begin, 4 * _WORDS)


def _python_state_in_memory(state: Any) -> bytes | None:
    _, words, waiting = state
    return struct.pack(f"{_WORDS}I", words[-1], *words[:-1]) if waiting is None else None


def _memory_of_numpy() -> bytes | None:
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS)


def _numpy_state_in_memory(state: Any) -> bytes | None:
    kind, words, position, is_waiting, _ = state
    if kind != "MT19937" or is_waiting:
        return None
    return bytes(words.tobytes() + struct.pack("i", position))


_KINDS = (
    _Kind(random.getstate, random.setstate, _memory_of_python, _python_state_in_memory),
    _Kind(np.random.get_state, np.random.set_state, _memory_of_numpy, _numpy_state_in_memory),
)
