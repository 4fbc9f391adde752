"""What models keep outside of themselves: attributes of their classes, and globals that their methods name.

Two models in one process share it. A counter there, or a generator, would go on from one to the other, and
neither would repeat itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self

from torch import nn

from strategies.estimate.anatomy import CONSTANTS, HoldingKind, kind_of

_FOREIGN = ("torch", "harness", "strategies", "builtins")
_FORMS = ("sequence", "mapping", "set", "buffer", "generator")


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a class, of a function, or among the globals of a Python module."""

    owner: Any
    name: str

    def __str__(self) -> str:
        owner = self.owner
        is_file = isinstance(owner, dict)
        return f"{owner['__name__'] if is_file else owner.__qualname__}.{self.name}"

    def get(self) -> Any:
        """Return what is there."""
        return self.owner.get(self.name) if isinstance(self.owner, dict) else vars(self.owner).get(self.name)

    def put(self, value: Any) -> None:
        """Let `value` be there."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What was at a place: the object, and its content where it has one that can be put back."""

    place: Place
    value: Any
    kind: HoldingKind | None
    content: Any

    @classmethod
    def at(cls, place: Place) -> _Kept:
        value = place.get()
        kind = _writable(value)
        return cls(place, value, kind, None if kind is None else kind.read(value))

    def put_back(self) -> None:
        if self.place.get() is not self.value:
            self.place.put(self.value)
        kind = self.kind
        if kind is not None and kind.write is not None and not kind.is_current(self.value, self.content):
            kind.write(self.value, self.content)


class OuterState:
    """State outside of a model, as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._places = places_of(model)
        self._kept = self._read()

    def put_back(self) -> None:
        """Make it what it was."""
        for kept in self._kept:
            kept.put_back()

    def forked(self) -> Self:
        """Return another one that begins with the same state."""
        return copy.copy(self)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this state within the scope, keep what becomes of it, and leave what was there before."""
        outside = self._read()
        self.put_back()
        try:
            yield
        finally:
            self._kept = self._read()
            for kept in outside:
                kept.put_back()

    def _read(self) -> tuple[_Kept, ...]:
        return tuple(_Kept.at(place) for place in self._places)


def places_of(model: nn.Module) -> tuple[Place, ...]:
    """Return the places of all classes of the modules of `model`, each once."""
    classes = {owner for module in model.modules() for owner in type(module).__mro__}
    ours = [owner for owner in classes if owner.__module__.partition(".")[0] not in _FOREIGN]
    return tuple({(id(each.owner), each.name): each for owner in ours for each in _places(owner)}.values())


def _places(owner: type) -> Iterator[Place]:
    """Yield where a class, and the globals that its functions name, hold state."""
    for name, value in list(vars(owner).items()):
        if not name.startswith("__") and _is_state(value):
            yield Place(owner, name)
        if isinstance(value, FunctionType):
            yield from _named_by(value)


def _named_by(function: FunctionType) -> Iterator[Place]:
    """Yield the state among the globals that a function names, and in the attributes of functions there."""
    globals_ = function.__globals__
    for used in function.__code__.co_names:
        value = globals_.get(used)
        if used in globals_ and not used.startswith("__") and _is_state(value):
            yield Place(globals_, used)
        elif isinstance(value, FunctionType) and (value.__module__ or "").partition(".")[0] not in _FOREIGN:
            yield from (Place(value, name) for name, held in vars(value).items() if _is_holding(name, held))


def _is_holding(name: str, held: Any) -> bool:
    return not name.startswith("__") and _is_state(held)


def _is_state(value: Any) -> bool:
    """Say whether a name holds state: what may be filled later, such as a cache that begins as None, too."""
    return isinstance(value, (*CONSTANTS, ContextVar)) or _writable(value) is not None


def _writable(value: Any) -> HoldingKind | None:
    kind = kind_of(value)
    return kind if kind is not None and kind.write is not None and kind.form in _FORMS else None
