"""Structures of arguments: what holds tensors, taken apart and made anew for each recomputation.

A call may change a list, a dictionary or a cache that it is given. Made anew, it is as the call found it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from io import IOBase
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from strategies.estimate.anatomy import kind_of

_WHOLE = (
    Tensor,
    torch.Size,
    nn.Module,
    type,
    FunctionType,
    MethodType,
    ModuleType,
    partial,
    Enum,
)
_FOREIGN = frozenset({"torch", "builtins", "numpy"})  # packages whose objects are not taken apart
_SEQUENCES = (list, deque)
_DEPTH = 6


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """An array or a generator of random numbers as a call found it.

    Fields:
        copy: it then; nobody else has it.
        again: makes one more from the copy.
    """

    copy: Any
    again: Callable[[Any], Any]

    @classmethod
    def of(cls, value: Any) -> _Found | None:
        """Return the state of `value`; `None` where it is no array and no generator, or never changes."""
        kind = kind_of(value)
        if kind is None or kind.write is None or kind.form not in {"buffer", "generator"}:
            return None
        # shallow copies of NumPy's generators share their bits, and deep ones of arrays copy tensors in them
        again = copy.copy if kind.form == "buffer" else copy.deepcopy
        return cls(again(value), again)

    def made(self) -> Any:
        """Return another array or generator in this state."""
        return self.again(self.copy)


@dataclass(slots=True, eq=False)
class _Node:
    """A container: what it is, the names or keys of its parts, and their structures."""

    value_type: type[Any]
    keys: list[Any] | None
    parts: list[_Node | None]
    pattern: Any = None  # a copy that gets the parts, of what is no dictionary and no plain object


def taken_apart(value: Any, leaves: list[Any]) -> _Node | None:
    """Return the structure of `value`, and append its leaves."""
    return _taken(value, leaves, {}, _DEPTH)


def put_together(structure: _Node | None, leaves: list[Any]) -> Any:
    """Return what has the structure and the leaves: new containers each time."""
    return _together(structure, iter(leaves), {})


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in `value`, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    leaves: list[Any] = []
    taken_apart(value, leaves)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _taken(value: Any, leaves: list[Any], known: dict[int, Any], depth: int) -> _Node | None:
    """Return the shape of a value and append its leaves; what stands in two places is noted once."""
    found = known.get(id(value), _Found.of(value))
    if type(found) is _Node:
        return found
    if found is not None:
        known[id(value)] = found
        leaves.append(found)
        return None
    parts = None if depth == 0 or isinstance(value, _WHOLE) else _parts(value)
    if parts is None:
        leaves.append(value)
        return None
    keys, held = parts
    node = _Node(type(value), keys, [])
    if type(value) not in {list, tuple}:
        known[id(value)] = node
    if keys is not None and type(value) is not dict and not _is_plain(type(value)):  # type: ignore[arg-type]
        node.pattern = _emptied(copy.copy(value))
    node.parts = [_taken(each, leaves, known, depth - 1) for each in held]
    return node


def _parts(value: Any) -> tuple[list[Any] | None, list[Any]] | None:
    """Return names and values of what `value` holds; `None` where it is not taken apart."""
    kind = type(value)
    if kind is list or isinstance(value, tuple):
        return None, list(value)
    if isinstance(value, dict):
        return list(value), list(value.values())
    if isinstance(value, _SEQUENCES):
        return list(range(len(value))), list(value)
    if isinstance(value, set):
        return [], []
    if callable(value) or isinstance(value, IOBase) or kind.__module__.partition(".")[0] in _FOREIGN:
        return None
    held = dict(getattr(value, "__dict__", {}))
    held |= {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}  # type: ignore[arg-type]
    return (list(held), list(held.values())) if held or hasattr(value, "__dict__") else None


def _emptied(value: Any) -> Any:
    """Return a copy without its elements, which are kept as parts."""
    if isinstance(value, _SEQUENCES):
        value.clear()
    return value


@cache
def _slots(kind: type[Any]) -> tuple[str, ...]:
    """Return the names under which objects of a class hold what is in their slots."""
    return tuple(
        name
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for name, each in vars(cls).items()
        if isinstance(each, MemberDescriptorType)
    )


@cache
def _is_plain(kind: type[Any]) -> bool:
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _together(node: _Node | None, leaves: Iterator[Any], known: dict[int, Any]) -> Any:
    """Return the value of a shape, made of the next leaves; what stood in two places does so again."""
    if node is None:
        return _leaf(next(leaves), known)
    if id(node) in known:
        return known[id(node)]
    kind, keys = node.value_type, node.keys
    if keys is None:
        parts = [_together(each, leaves, known) for each in node.parts]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    made = {} if kind is dict else object.__new__(kind) if node.pattern is None else copy.copy(node.pattern)
    known[id(node)] = made
    parts = [_together(each, leaves, known) for each in node.parts]
    if isinstance(made, dict):
        if node.pattern is not None:
            made.clear()
        made.update(zip(keys, parts, strict=True))
    elif isinstance(made, _SEQUENCES):
        made.extend(parts)
    else:
        slots = _slots(kind)  # type: ignore[arg-type]
        for name, part in zip(keys, parts, strict=True):
            if name in slots:
                object.__setattr__(made, name, part)  # a class may forbid it, as a frozen one does
            else:
                vars(made)[name] = part
    return made


def _leaf(leaf: Any, known: dict[int, Any]) -> Any:
    """Return a leaf; of what a call may have changed, another one, the same in each place."""
    if type(leaf) is not _Found:
        return leaf
    if id(leaf) not in known:
        known[id(leaf)] = leaf.made()
    return known[id(leaf)]
