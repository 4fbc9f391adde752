"""Finding the tensors in a value, and the plain tensors in a tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MappingView
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, np.generic)
_IN_ORDER = (list, tuple, deque, AbstractSet, MappingView)
_DENSE = frozenset({Tensor, nn.Parameter, FakeTensor})
"""Types of tensors that are no wrappers, as their layout says no sparse ones either."""

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the plain tensors of a sparse one, by its layout."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of nested mappings, sequences and dataclasses, in order of appearance."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if type(item) not in _ATOMS:  # what most arguments of operators are
                yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def plain_tensors_in(value: Any) -> list[Tensor]:
    """Return the plain tensors of nested mappings, sequences and dataclasses, as `plain_tensors` does.

    Asked for each operator of a watched step, whose arguments are mostly dense tensors and numbers.
    """
    found: list[Tensor] = []
    _add_plain(value, found)
    return found


def _add_plain(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if kind in _DENSE and value.layout is torch.strided:
        found.append(value)
    elif kind is tuple or kind is list:
        for item in value:
            if type(item) not in _ATOMS:
                _add_plain(item, found)
    else:
        found.extend(plain_tensors(tensors_in(value)))


def tensors_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the operands that an operator writes to, as its schema says."""
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    for position, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def held_by(value: Any) -> dict[str, Any] | None:
    """Return what a value holds by the path to it, `[0]`, `['key']` or `.name`; `None` if it holds nothing.

    Walked are mappings and their views, sequences, queues, sets, dataclasses, arrays of objects, and the
    attributes of all other objects, in slots or not; neither classes, functions and modules nor iterators.
    """
    if isinstance(value, _ATOMS) or callable(value):
        return None
    if isinstance(value, Mapping):
        return {f"[{key!r}]": item for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _by_position(value.flat) if value.dtype.hasobject else None
    if isinstance(value, _IN_ORDER):
        return _by_position(value)
    return _attributes(value)


def tensors_held_by(value: Any) -> Iterator[Tensor]:
    """Yield every tensor that can be reached from a value, whatever holds it; each holder is read once."""
    yield from (each for each in _numbers(value, seen={}) if isinstance(each, Tensor))


def holds_numbers(value: Any) -> bool:
    """Return whether a tensor or an array can be reached from a value."""
    return any(True for _ in _numbers(value, seen={}))


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield `tensors` with each wrapper (a DTensor) and sparse one replaced by its plain parts."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            # a DTensor's parts are its local tensor and its device mesh
            yield from plain_tensors(tensors_in([getattr(tensor, name) for name in names]))
        elif tensor.layout in _PARTS:
            with _disable_current_modes():
                parts = [getattr(tensor, part)() for part in _PARTS[tensor.layout]]
            yield from parts
        else:
            yield tensor


def parameters_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the plain tensors that are the parameters now: FSDP's unsharded ones while it holds them."""
    return plain_tensors(model.parameters())


def gradients_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the plain tensors of the gradients that the model's parameters hold now."""
    return plain_tensors(p.grad for p in model.parameters() if p.grad is not None)


def optimizer_state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the plain tensors of the optimizer's state."""
    return plain_tensors(tensors_in(list(optimizer.state.values())))


def alias_of(tensor: Tensor) -> Tensor:
    """Return another tensor on the same storage, made unseen by dispatch modes."""
    with _disable_current_modes():
        alias: Tensor = torch.ops.aten.alias.default(tensor)
    return alias


def _by_position(items: Any) -> dict[str, Any]:
    return {f"[{index}]": item for index, item in enumerate(items)}


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, by name; `None` of one that can have none."""
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    if not slots and not hasattr(value, "__dict__"):
        return None
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )
    return {f".{name}": item for name, item in held.items()}


def _names(slots: Any) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _numbers(value: Any, *, seen: dict[int, Any]) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield tensors and arrays that can be reached from a value; `seen` are the holders that were read."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject):
        yield value
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # which so stays alive, and its number its own
    for item in (held_by(value) or {}).values():
        yield from _numbers(item, seen=seen)
