"""State of models outside of themselves: attributes of their classes, and globals that their methods name.

Two models in one process share it. A counter there, or a generator, would go on from one to the other, and
neither would repeat itself.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Self

from torch import Tensor, nn

from strategies.estimate.anatomy import CONSTANTS, HoldingKind, is_empty, kind_of

Cached = functools._lru_cache_wrapper  # noqa: SLF001 (no public name)
_FOREIGN = ("torch", "harness", "strategies", "builtins")
_FORMS = ("sequence", "mapping", "set", "buffer", "generator")
_BINDING = frozenset({MethodType, classmethod, staticmethod})


@dataclass(frozen=True, slots=True)
class Place:
    """A name in a class, of a function, among the globals of a Python module, or a variable of a closure."""

    owner: Any
    name: str

    def __str__(self) -> str:
        owner = self.owner
        if isinstance(owner, CellType):
            return self.name
        is_file = isinstance(owner, dict)
        return f"{owner['__name__'] if is_file else owner.__qualname__}.{self.name}"

    def get(self) -> Any:
        """Return what is there; `None` for a variable that is deleted."""
        if isinstance(self.owner, CellType):
            return None if is_empty(self.owner) else self.owner.cell_contents
        return self.owner.get(self.name) if isinstance(self.owner, dict) else vars(self.owner).get(self.name)

    def put(self, value: Any) -> None:
        """Let `value` be there."""
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The object at a place, and its content where that can be put back."""

    place: Place
    value: Any
    kind: HoldingKind | None
    content: Any

    @classmethod
    def at(cls, place: Place) -> _Kept:
        value = place.get()
        kind = _writable(value)
        return cls(place, value, kind, None if kind is None else kind.read(value))

    def is_current(self) -> bool:
        is_there = self.place.get() is self.value
        return is_there and (self.kind is None or self.kind.is_current(self.value, self.content))

    def put_back(self) -> None:
        if self.place.get() is not self.value:
            self.place.put(self.value)
        kind = self.kind
        if kind is not None and kind.write is not None and not kind.is_current(self.value, self.content):
            kind.write(self.value, self.content)


class OuterState:
    """State outside of a model, as it was when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._places = all_places_of(model)
        self._kept = self._read()
        self._caches = [
            (each, each.cache_info()) for each in _functions_of(model) if isinstance(each, Cached)
        ]

    def is_current(self) -> bool:
        """Say whether it is what it was, and no function has kept a result by `functools.cache` since."""
        return not self._changed_caches() and all(kept.is_current() for kept in self._kept)

    def put_back(self) -> None:
        """Make it what it was."""
        for kept in self._kept:
            kept.put_back()

    def clear_caches(self) -> list[str]:
        """Let functions that have kept a result since by `functools.cache` forget all that they keep.

        Returns:
            The names of those that had kept results before, which are lost, too.
        """
        changed = self._changed_caches()
        for cache, _ in changed:
            cache.cache_clear()
        return [cache.__name__ for cache, before in changed if before.currsize]

    def _changed_caches(self) -> list[tuple[Cached[Any], functools._CacheInfo]]:
        return [each for each in self._caches if each[0].cache_info().misses != each[1].misses]

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
    places = (each for owner in _classes_of(model) for each in _places(owner))
    return tuple({(id(each.owner), each.name): each for each in places}.values())


def all_places_of(model: nn.Module) -> tuple[Place, ...]:
    """Return the places of `places_of`, and those of functions that modules hold and that forwards call."""
    return *places_of(model), *_places_of_functions(model)


def tensor_places(model: nn.Module) -> tuple[Place, ...]:
    """Return the places in classes of modules of `model`, and of functions, with tensors or other modules.

    A list, tuple or dictionary there counts if it holds tensors; what `functools.cache` keeps has no place.
    """
    functions = [each for each in _functions_of(model) if isinstance(each, FunctionType)]
    named = (Place(owner, name) for owner in _classes_of(model) for name in vars(owner))
    places = chain(named, chain.from_iterable(map(_names_in, functions)))
    own = set(model.modules())
    found = (each for each in places if not each.name.startswith("__") and _has_tensors(each.get(), own))
    return tuple({(id(each.owner), each.name): each for each in found}.values())


def _names_in(function: FunctionType) -> Iterator[Place]:
    """Yield the places of globals, variables of closures and default values of a function."""
    for code in _codes_in(function.__code__):
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType):
                yield from (Place(vars(value), each) for each in code.co_names if each in vars(value))
            elif value is not None:
                yield Place(function.__globals__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell):
            yield Place(cell, name)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (Place({"default": each}, "default") for each in defaults)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes_in(each)


def _has_tensors(value: Any, own: Container[Any]) -> bool:
    """Say whether a value is or holds a tensor, or is a module that is none of `own`."""
    if isinstance(value, nn.Module):
        return value not in own
    held = value.values() if type(value) is dict else value if type(value) in {list, tuple} else (value,)
    return any(isinstance(each, Tensor) for each in held)


def _classes_of(model: nn.Module) -> list[type]:
    """Return the user's classes of modules of `model`."""
    classes = {owner for module in model.modules() for owner in type(module).__mro__}
    return [owner for owner in classes if not _is_foreign(owner)]


def _places_of_functions(model: nn.Module) -> tuple[Place, ...]:
    """Return the places of functions that modules hold, and of those that forwards call, each once."""
    places = (
        place
        for function in _functions_of(model)
        if isinstance(function, FunctionType)
        for place in _places_of_function(function)
    )
    return tuple({(id(each.owner), each.name): each for each in places}.values())


def _functions_of(model: nn.Module) -> list[FunctionType | Cached[Any]]:
    """Return the user's functions that modules hold, and those that forwards call, each once."""
    held = (value for module in model.modules() for value in vars(module).values())
    named = (value for owner in _classes_of(model) for value in vars(owner).values())
    found: dict[int, FunctionType | Cached[Any]] = {}
    waiting = [each for value in (*held, *named) if (each := _function(value)) is not None]
    while waiting:
        function = waiting.pop()
        if id(function) not in found:
            found[id(function)] = function
            called = (
                map(function.__globals__.get, function.__code__.co_names)
                if isinstance(function, FunctionType)
                else [function.__wrapped__]
            )
            waiting += [each for value in called if (each := _function(value)) is not None]
    return list(found.values())


def _function(value: Any) -> FunctionType | Cached[Any] | None:
    """Return the user's function that a value is, or is bound from."""
    # other values are asked for nothing: what stands for a package that is missing raises
    function = value.__func__ if type(value) in _BINDING else value
    is_own = isinstance(function, FunctionType | Cached) and not _is_foreign(function)
    return function if is_own else None


def _is_foreign(value: Any) -> bool:
    """Say whether a class or function is of torch, of Python or of this program."""
    return (value.__module__ or "").partition(".")[0] in _FOREIGN


def _places_of_function(function: FunctionType) -> Iterator[Place]:
    yield from _named_by(function)
    # a dictionary of its own owns them: attributes that a call adds go away again, and defaults have no name
    yield Place({"__name__": function.__qualname__, "__dict__": vars(function)}, "__dict__")
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for number, default in enumerate(defaults):
        if _writable(default) is not None:
            yield Place(
                {"__name__": function.__qualname__, f"default {number}": default}, f"default {number}"
            )
    yield from (Place(function, name) for name, held in vars(function).items() if _is_holding(name, held))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell) and _is_state(cell.cell_contents):
            yield Place(cell, name)


def _places(owner: type) -> Iterator[Place]:
    """Yield where a class, and the globals that its functions name, hold state."""
    for name, value in list(vars(owner).items()):
        if not name.startswith("__") and _is_state(value):
            yield Place(owner, name)
        if isinstance(value, FunctionType):
            yield from _named_by(value)


def _named_by(function: FunctionType) -> Iterator[Place]:
    globals_ = function.__globals__
    for used in function.__code__.co_names:
        value = globals_.get(used)
        if used in globals_ and not used.startswith("__") and _is_state(value):
            yield Place(globals_, used)
        elif isinstance(value, FunctionType) and not _is_foreign(value):
            yield from (Place(value, name) for name, held in vars(value).items() if _is_holding(name, held))


def _is_holding(name: str, held: Any) -> bool:
    return not name.startswith("__") and _is_state(held)


def _is_state(value: Any) -> bool:
    """Say whether a name holds state: what may be filled later, such as a cache that begins as None, too."""
    return isinstance(value, (*CONSTANTS, ContextVar)) or _writable(value) is not None


def _writable(value: Any) -> HoldingKind | None:
    kind = kind_of(value)
    return kind if kind is not None and kind.write is not None and kind.form in _FORMS else None
