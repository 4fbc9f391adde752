"""Taking apart an object among the state of modules, and giving it back what it held.

One table for all who walk that state: what compares it and what rewinds it know the same kinds of objects.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import is_
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    NoneType,
    NotImplementedType,
)
from typing import Any, Literal, TypeAlias
from uuid import UUID

import numpy as np
import torch

from strategies import generators

Form: TypeAlias = Literal["sequence", "mapping", "set", "buffer", "generator", "callable"]
"""What a value is: it has items in order, entries by key, members, plain data, or random numbers to give; a
`callable` holds what it is made of."""

CONSTANTS = (
    *(NoneType, bool, int, float, complex, str, bytes, Enum, np.generic),
    *(EllipsisType, NotImplementedType, range, slice, Decimal, Fraction, date, time, timedelta, tzinfo, UUID),
    *(PurePath, re.Pattern, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that nobody can change; objects of subclasses may have attributes of their own."""

DEEPEST = 32
"""Containers and objects one inside another that are taken apart."""

_OPEN = {"argparse", "array", "collections", "enum", "functools", "itertools", "queue", "types", "weakref"}
_CLOSED = sys.stdlib_module_names - _OPEN
_POINTER = np.dtype(np.intp).itemsize
_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldingKind:
    """The way in which values of some types hold others, in addition to their attributes.

    All read and write by the methods of the type itself: a subclass may mean something else by them.

    Fields:
        read: returns a copy of the content, in which the parts are the same objects.
        write: makes the value hold what `read` returned; `None` for what nobody can change.
    """

    form: Form
    types: tuple[type[Any], ...]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None

    def parts(self, content: Any) -> Iterator[tuple[Any, Any]]:
        """Yield key or position of each part in a content, and the part."""
        if self.form in ("mapping", "callable"):
            return iter(content.items())
        has_parts = self.form in ("sequence", "set") or has_objects(content)
        return (
            enumerate(content.flat if isinstance(content, np.ndarray) else content) if has_parts else iter(())
        )

    def is_current(self, value: Any, content: Any) -> bool:
        """Say whether `value` is known to hold the same objects, or the same data, as `content`."""
        now = self.read(value)
        if self.form in ("mapping", "callable"):
            return _are_same(now, content) and _are_same(now.values(), content.values())
        if self.form in ("sequence", "set"):
            return _are_same(now, content)
        return self.form == "buffer" and type(now) is type(content) and _has_same_data(now, content)


def kind_of(value: Any) -> HoldingKind | None:
    """Return how `value` holds its content; `None` for what has attributes at most."""
    cls: Any = type(value)
    return _kind_of(cls)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has, those in slots included."""
    slots = {name: _read_slot(slot, value) for name, slot in _slots(type(value))}
    return {name: part for name, part in slots.items() if part is not _MISSING} | _dictionary(value)


def put_attributes(value: Any, before: dict[str, Any]) -> None:
    """Give an object the attributes that it had before, in their order, and no other."""
    own = _dictionary(value)
    slots = dict(_slots(type(value)))
    for name, slot in slots.items():
        if name in before:
            slot.__set__(value, before[name])
        elif _read_slot(slot, value) is not _MISSING:
            slot.__delete__(value)
    then = {name: part for name, part in before.items() if name not in slots}
    if list(own) != list(then):
        own.clear()
    own.update(then)


def has_hidden_content(value: Any) -> bool:
    """Say whether `value` holds something that neither `kind_of` nor `attributes` tells of.

    Python asks the same before it pickles an object: is it larger than its attributes need?
    """
    cls = type(value)
    if kind_of(value) is not None:
        return False
    kept = sum(offset > 0 for offset in (cls.__dictoffset__, cls.__weakrefoffset__))
    pointers = kept + sum(1 for _ in _slots(cls))
    return bool(cls.__itemsize__) or cls.__basicsize__ > object.__basicsize__ + pointers * _POINTER


def is_closed(value: Any) -> bool:
    """Say whether `value` is Python's own and none of a model's state: a logger, a lock, a thread."""
    return type(value).__module__.partition(".")[0] in _CLOSED and kind_of(value) is None


@functools.lru_cache(maxsize=1024)
def _kind_of(cls: type[Any]) -> HoldingKind | None:
    return next((kind for kind in _KINDS if issubclass(cls, kind.types)), None)


def _dictionary(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _slots(cls: type[Any]) -> Iterator[tuple[str, MemberDescriptorType]]:
    """Yield the slots of a class written in Python; a private name as Python spells it."""
    for each in cls.__mro__:
        if "__slots__" in vars(each):
            for name, slot in vars(each).items():
                if isinstance(slot, MemberDescriptorType):
                    yield name, slot


def _read_slot(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value, type(value))
    except AttributeError:  # nothing there yet
        return _MISSING


def has_objects(content: Any) -> bool:
    """Return whether an array holds objects rather than numbers."""
    return isinstance(content, np.ndarray) and content.dtype.hasobject


def _are_same(now: Any, then: Any) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _has_same_data(now: Any, then: Any) -> bool:
    if not isinstance(now, np.ndarray):
        return bool(now == then)
    if has_objects(now):
        return _are_same(list(now.flat), list(then.flat))
    return now.shape == then.shape and bool(now.tobytes() == then.tobytes())


def _write_ordered(value: Any, content: Mapping[Any, Any]) -> None:
    OrderedDict.clear(value)
    for key, part in content.items():
        OrderedDict.__setitem__(value, key, part)


def _write_dictionary(value: Any, content: Mapping[Any, Any]) -> None:
    dict.clear(value)
    dict.update(value, content)


def _write_queue(value: Any, content: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, content)


def _write_set(value: Any, content: list[Any]) -> None:
    set.clear(value)
    set.update(value, content)


def _enclosed(function: Any) -> dict[str, Any]:
    """Return what a function made by another one holds of it; of all others, which live as long, nothing."""
    names = function.__code__.co_freevars if "<locals>" in function.__qualname__ else ()
    cells = zip(names, function.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells if not is_empty(cell)}


def is_empty(cell: Any) -> bool:
    """Say whether a variable of a closure has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def _kind(
    form: Form,
    types: type[Any] | tuple[type[Any], ...],
    read: Callable[[Any], Any],
    write: Callable[[Any, Any], object] | None = None,
) -> HoldingKind:
    return HoldingKind(
        form=form, types=types if isinstance(types, tuple) else (types,), read=read, write=write
    )


_KINDS = (
    _kind("sequence", list, list.copy, lambda value, content: list.__setitem__(value, slice(None), content)),
    _kind("sequence", tuple, lambda value: list(tuple.__iter__(value))),
    _kind("sequence", deque, lambda value: list(deque.__iter__(value)), _write_queue),
    _kind("mapping", OrderedDict, lambda value: dict(OrderedDict.items(value)), _write_ordered),
    _kind("mapping", dict, lambda value: dict(dict.items(value)), _write_dictionary),
    _kind("mapping", MappingProxyType, lambda value: dict(value.items())),
    _kind("set", set, lambda value: list(set.__iter__(value)), _write_set),
    _kind("set", frozenset, lambda value: list(frozenset.__iter__(value))),
    _kind("buffer", np.ndarray, np.array, np.copyto),
    _kind("buffer", bytearray, bytes, lambda value, data: bytearray.__setitem__(value, slice(None), data)),
    _kind("buffer", array, lambda value: value[:], lambda value, data: value.__setitem__(slice(None), data)),
    _kind("buffer", memoryview, lambda value: value.tobytes()),
    _kind("buffer", itertools.count, repr),
    *(_kind("generator", each.types, each.read, each.write) for each in generators.KINDS),
    _kind("callable", FunctionType, _enclosed),
    _kind("callable", MethodType, lambda value: {"__self__": value.__self__, "__func__": value.__func__}),
    _kind(
        "callable",
        functools.partial,
        lambda value: {"func": value.func, "args": value.args, "keywords": value.keywords},
    ),
    _kind("callable", (BuiltinFunctionType, MethodWrapperType), lambda value: {"__self__": value.__self__}),
    _kind("callable", weakref.ref, lambda value: {"()": value()}),
)
"""The first that fits counts."""
