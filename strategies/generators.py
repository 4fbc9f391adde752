"""All generators of random numbers: read, put back, compared, and watched for draws.

Known are the generators that code draws from without holding them, which are torch's, one for each device,
Python's and NumPy's; and objects of their kinds that code holds itself.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

CPU = torch.device("cpu")
_OF_CPU = ("cpu", "meta")
_WORDS = 625
"""624 words of a Mersenne twister and its position."""

_NUMPY_SEEDS = 1 << 32

Stash: TypeAlias = Callable[[], Callable[[], None]]
"""Puts generators into the state of forward; what it returns puts them back as they were."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects that draw random numbers.

    Fields:
        read: returns the state of one; `None` for one without a state.
        write: puts it back; `None` where that is not possible.
    """

    types: type[Any]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None


def _write_bits(value: np.random.Generator, state: Any) -> None:
    value.bit_generator.state = state


KINDS = (
    Kind(torch.Generator, methodcaller("get_state"), torch.Generator.set_state),
    Kind(random.SystemRandom, lambda _value: None, None),
    Kind(random.Random, methodcaller("getstate"), lambda value, state: value.setstate(state)),
    Kind(np.random.Generator, lambda value: value.bit_generator.state, _write_bits),
    Kind(np.random.RandomState, methodcaller("get_state"), np.random.RandomState.set_state),
)
"""The first that fits counts."""


def _unknown(*_state: Any) -> None:
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One generator.

    Fields:
        name: its device, `python` or `numpy`, or its class where code holds it.
        seen: reads its state where meters of memory see it, for a state that somebody holds through a step.
        memory: what it has in memory; `None` where that is unknown.
        memory_of: memory of a state; `None` where more than that belongs to it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    seen: Callable[[], Any]
    memory: Callable[[], bytes | None] = _unknown
    memory_of: Callable[[Any], bytes | None] = _unknown

    def now(self, *, is_seen: bool = False) -> State:
        """Return the state that it is in. `is_seen`: let meters of memory see it."""
        memory, value = self.memory(), (self.seen if is_seen else self.read)()
        return State(self, value, memory if memory == self.memory_of(value) else None)


class State(NamedTuple):
    """A state of one generator.

    Python and NumPy give theirs as a copy of 624 words, which takes longer than many blocks. Their memory
    tells in less than a microsecond whether it moved: each draw moves it. It is believed where it is seen to
    hold the state that was given, and no second normal number waits with it.

    Fields:
        memory: the generator's memory then; `None` where that does not tell.
    """

    source: Source
    value: Any
    memory: bytes | None

    def is_current(self) -> bool:
        """Say whether the generator is known, by its memory, to be in this state."""
        return self.memory is not None and self.memory == self.source.memory()

    def put(self) -> None:
        """Put the generator into this state."""
        if not self.is_current():
            self.source.write(self.value)


def of_object(value: Any) -> Source:
    """Return the generator that `value`, an object of one of `KINDS`, is."""
    kind = next(kind for kind in KINDS if isinstance(value, kind.types))
    read, write = partial(kind.read, value), _unknown if kind.write is None else partial(kind.write, value)
    return Source(type(value).__name__, read, write, read)


def of_device(device: torch.device) -> Source:
    """Return torch's generator of a device."""
    if device.index is None and device.type not in _OF_CPU:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return _of_numbered(device)


@cache
def _of_numbered(device: torch.device) -> Source:
    generator = default_of(device)
    return Source(str(device), generator.get_state, generator.set_state, partial(_seen_state, device))


def _seen_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator by the function that meters of memory replace to see it.

    Reading makes a tensor where no operator runs. Its name is looked up when it is called: meters replace it.
    """
    if device.type in _OF_CPU:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def default_of(device: torch.device) -> torch.Generator:
    """Return the generator that operators on a device draw from; those without data have the CPU's."""
    if device.type in _OF_CPU:
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    generators: Sequence[torch.Generator] = module.default_generators
    return generators[module.current_device() if device.index is None else device.index]


def of_devices(devices: Iterable[torch.device]) -> list[Source]:
    """Return torch's generators of the CPU, and of `devices` that have one."""
    others = (each for each in devices if each.type not in _OF_CPU)
    return list(dict.fromkeys(map(of_device, (CPU, *others))))


def of_torch() -> list[Source]:
    """Return torch's generators of the CPU and of all devices that this process has used, and opens none."""
    device = torch.accelerator.current_accelerator()
    found = () if device is None else getattr(torch.get_device_module(device), "default_generators", ())
    return of_devices(each.device for each in found)


PYTHON: Source
NUMPY: Source


def put(states: Iterable[State]) -> None:
    """Put each generator into its state."""
    for each in states:
        each.put()


def moved(states: Sequence[State]) -> list[State]:
    """Return the states that their generators are not in any more."""
    if not states:
        return []
    with _disable_current_modes():  # states have values even where tensors have none
        return [
            each
            for each in states
            if not each.is_current() and comparable(each.value) != comparable(each.source.read())
        ]


def comparable(state: Any) -> Hashable:
    """Return what is equal for equal states."""
    if isinstance(state, dict):
        return tuple((name, comparable(each)) for name, each in state.items())
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, tuple):  # of numbers and at most an array
        return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in state)
    return state.tobytes() if isinstance(state, np.ndarray) else state


@contextmanager
def restored() -> Iterator[None]:
    """Leave all generators that code draws from without holding them as they were."""
    before = [each.now() for each in (*of_torch(), PYTHON, NUMPY)]
    try:
        yield
    finally:
        put(before)


def seed(number: int, device: torch.device | None = None) -> None:
    """Seed torch's generators of the CPU and of `device`, or of all devices, Python's and NumPy's."""
    if device is None and torch.accelerator.current_accelerator() is not None:
        torch.manual_seed(number)
    for each in {CPU, device or CPU}:
        default_of(each).manual_seed(number)
    random.seed(number)
    np.random.seed(number % _NUMPY_SEEDS)  # noqa: NPY002 (models draw from the global generator)


def stashed(source: torch.Generator | torch.device) -> Stash:
    """Return the state of a generator, or of that of a device, which meters see."""
    found = of_device(source) if isinstance(source, torch.device) else of_object(source)
    return partial(_exchanged, [found.now(is_seen=True)])


def _exchanged(states: Sequence[State]) -> Callable[[], None]:
    before = [each.source.now(is_seen=True) for each in states]
    put(states)
    return partial(put, before)


class DrawWatch:
    """Finds out whether a call of an operator draws random numbers, which its tags do not tell.

    Watched are the generators of the CPU and of the operands' devices. Make it before the call.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._before = [each.now() for each in of_devices(devices)]

    def has_drawn(self) -> bool:
        """Say whether a generator has moved since."""
        return bool(moved(self._before))

    def stash(self) -> Stash | None:
        """Return the states before the call of the generators that have moved; `None` where none has."""
        states = moved(self._before)
        if not states:
            return None
        put_back = _exchanged(states)
        held = [each.source.now(is_seen=True) for each in states]
        put_back()
        return partial(_exchanged, held)


class LatestStates:
    """Reads Python's and NumPy's generators; a state that is still there is read once."""

    def __init__(self) -> None:
        self._latest: tuple[State, ...] = ()

    def states(self) -> tuple[State, ...]:
        """Return the states that both are in."""
        if not self._latest:
            self._latest = PYTHON.now(), NUMPY.now()
        elif not all(each.is_current() for each in self._latest):
            self._latest = tuple(each if each.is_current() else each.source.now() for each in self._latest)
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


PYTHON = Source(
    "python", random.getstate, random.setstate, random.getstate, _memory_of_python, _python_state_in_memory
)
NUMPY = Source(
    "numpy",
    np.random.get_state,
    np.random.set_state,
    np.random.get_state,
    _memory_of_numpy,
    _numpy_state_in_memory,
)
