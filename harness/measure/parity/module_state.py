"""State of modules outside of parameters and buffers: attributes, and what `get_extra_state` returns.

Recomputation runs a forward once more, and what it counts, caches or draws is then counted, cached or drawn
twice.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import marshal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MethodDescriptorType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness.measure.parity.checksum import checksum
from strategies.estimate.anatomy import (
    CONSTANTS,
    DEEPEST,
    HoldingKind,
    attributes,
    has_hidden_content,
    has_objects,
    is_closed,
    kind_of,
)

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_OURS = "_acbench"
"""Attributes that a strategy puts on modules begin so; the plain model has none."""
_MOST_ITEMS = 1000
"""Items of a container that are compared one by one; of a larger one that holds plain values a digest is."""
_SHOWN = 8
_NAMES = (type, ModuleType, MethodDescriptorType, WrapperDescriptorType, np.ufunc)
"""What is of Python modules, and of no model."""
_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)
_OWN = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_STRANGE = ("torch", "harness", "strategies")
"""Packages whose objects hold bookkeeping of their own."""
_SILENT = _STRANGE[1:]
"""Those whose objects the plain model does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldState:
    """The state of a model's modules outside of parameters and buffers.

    Fields:
        values: tensors, numbers, texts, lengths and digests by path.
        uncompared: paths of what nothing can be read of, each with its type.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    uncompared: tuple[str, ...] = ()


def module_state(model: nn.Module) -> HeldState:
    """Return what the modules of `model` hold, whatever it is kept in.

    A container has its length besides its items. What is reached by two paths is read on the first.
    """
    reader = _Reader(model)
    for fqn, module in model.named_modules():
        if not isinstance(module, _WRAPPERS):
            reader.module(module, fqn)
    return HeldState(values=reader.values, uncompared=tuple(reader.uncompared))


def hooks_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks that people have put on a module, by kind and place: `forward hook 0`.

    Those of torch, of its wrappers and of strategies are left out.
    """
    for attribute, kind in _HOOKS.items():
        hooks = [
            hook for hook in getattr(module, attribute).values() if _package(_function(hook)) not in _STRANGE
        ]
        yield from ((f"{kind} {place}", hook) for place, hook in enumerate(hooks))


class StateChanges:
    """Tells what of the state of `model` has changed since this was made.

    What two models were told apart by before their first step, such as a flag that turns checkpointing on, is
    no result of a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: _mark(value) for name, value in module_state(model).values.items()}

    def names(self, state: Mapping[str, Any]) -> frozenset[str]:
        """Return the names in `state`, or gone from it, whose values are others than before."""
        kept = {name for name, value in state.items() if self._is_as_before(name, value)}
        return frozenset((state.keys() | self._before.keys()) - kept)

    def _is_as_before(self, name: str, value: Any) -> bool:
        return name in self._before and _is_same(self._before[name], _mark(value))


def _mark(value: Any) -> Any:
    """Return what tells whether a value is another one later.

    A tensor is known by its writes, and by a sum of its bytes: autograd counts no writes through `.data`.
    """
    if not isinstance(value, Tensor):
        return value
    version = 0 if value.is_inference() else value._version  # noqa: SLF001 (autograd's own count)
    return value, (version, checksum(value))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and one[1] == other[1]
    return type(one) is type(other) and bool(one == other)


class _Reader:
    """Takes apart what can be reached from modules.

    Fields:
        values, uncompared: as in `HeldState`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, Any] = {}
        self.uncompared: dict[str, None] = {}
        self._seen: dict[int, Any] = {id(module): module for module in model.modules()}

    def module(self, module: nn.Module, fqn: str, depth: int = 0) -> None:
        """Read attributes of a module, those of its tensors, and its extra state."""
        prefix = f"{fqn}." if fqn else ""
        for name, value in list(vars(module).items()):
            if name not in _OWN and not _is_bookkeeping(name):
                self._read(value, prefix + name, depth)
        for name, hook in hooks_of(module):
            self._read(hook, prefix + name, depth)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            self._attributes(tensor, prefix + name, depth)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._read(module.get_extra_state(), f"{prefix}(extra state)", depth)

    def _read(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, CONSTANTS):
            self.values[name] = _constant(value)
        elif isinstance(value, Tensor) and not _is_ours(value) and _has_memory(value):
            self.values[name] = value
        if type(value) not in _NUMBERS and id(value) not in self._seen and not isinstance(value, _NAMES):
            self._seen[id(value)] = value  # an `id` is only its own while it lives
            self._look_into(value, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        """Note what a value holds, as far as anybody can tell."""
        if isinstance(value, Enum) or _is_ours(value):
            return
        if isinstance(value, (*CONSTANTS, Tensor)):
            self._attributes(value, name, depth + 1)
        elif depth == DEEPEST or _is_opaque(value):
            self.uncompared[f"{name} ({type(value).__qualname__})"] = None
        elif isinstance(value, nn.Module):
            self._unregistered(value, name, depth + 1)
        else:
            self._content(value, name, depth + 1)
            self._attributes(value, name, depth + 1)

    def _unregistered(self, module: nn.Module, name: str, depth: int) -> None:
        self.module(module, name, depth)
        for group in (module._parameters, module._buffers, module._modules):  # noqa: SLF001 (as they are)
            for key, part in group.items():
                self._read(part, f"{name}.{key}", depth)

    def _attributes(self, value: Any, name: str, depth: int) -> None:
        if is_closed(value) or type(value).__module__.startswith("torch.distributed."):
            return  # attributes of FSDP's and DTensor's own tensors say how they are sharded
        for key, part in attributes(value).items():
            if not _is_bookkeeping(key):
                self._read(part, f"{name}.{key}", depth)

    def _content(self, value: Any, name: str, depth: int) -> None:
        kind = kind_of(value)
        if kind is None:
            return
        content = kind.read(value)
        if kind.form == "generator":
            self.values[name] = (
                content if isinstance(content, Tensor) else f"generator {_hash(str(content).encode())}"
            )
        elif kind.form == "buffer" and not has_objects(content):
            self.values[name] = _data(content)
        elif kind.form == "set":
            self.values[f"length of {name}"] = len(content)
            if all(map(_is_plain, content)):
                self.values[name] = _Members(frozenset(content))
            else:
                self.uncompared[f"members of {name}"] = None
        else:
            self._parts(kind, content, name, depth)

    def _parts(self, kind: HoldingKind, content: Any, name: str, depth: int) -> None:
        if kind.form != "callable":
            self.values[f"length of {name}"] = len(content)
            items = list(content.flat) if kind.form == "buffer" else content
            digest = _digest(items) if len(items) > _MOST_ITEMS else None
            if digest is not None:
                self.values[name] = digest
                return
        if kind.form == "mapping" and len(content) > 1:
            self.values[f"order of {name}"] = _Keys(tuple(map(_key, content, itertools.count())))
        for position, (key, part) in enumerate(kind.parts(content)):
            self._read(part, f"{name}{_path(kind, key, position)}", depth)


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of a set, in no order."""

    items: frozenset[Any]

    def __str__(self) -> str:
        return f"{{{_begin(sorted(map(repr, self.items)))}}}"


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a mapping, in order."""

    items: tuple[str, ...]

    def __str__(self) -> str:
        return f"({_begin(self.items)})"


def _begin(texts: Sequence[str]) -> str:
    return ", ".join((*texts[:_SHOWN], "…") if len(texts) > _SHOWN else texts)


def _is_bookkeeping(name: str) -> bool:
    return name.startswith((_OURS, "_fsdp", "_is_fsdp", "_ddp", "_dynamo", "__"))


def _package(value: Any) -> str:
    where = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return (where or "").partition(".")[0]


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook


def _is_ours(value: Any) -> bool:
    return _package(value) in _SILENT


def _is_opaque(value: Any) -> bool:
    if kind_of(value) is not None or isinstance(value, nn.Module) or type(value) is object:
        return False
    return _package(value) in _STRANGE or is_closed(value) or has_hidden_content(value)


def _constant(value: Any) -> Any:
    if isinstance(value, _NUMBERS) and not isinstance(value, Enum | np.generic):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value))
    return repr(value)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor can be read: FSDP1 leaves views of storages that it has freed in attributes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta or local.layout is not torch.strided or local.numel() == 0:
        return not local.is_meta
    return local.untyped_storage().nbytes() > 0


def _data(data: Any) -> Any:
    """Return plain data as a tensor; as text what torch has no numbers for."""
    if isinstance(data, str):
        return data
    values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.array(data)
    is_number = values.dtype.kind in "biufc"
    return torch.from_numpy(values.copy()) if is_number else f"{values.dtype.str} {values.tolist()}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, CONSTANTS)


def _digest(content: Any) -> str | None:
    """Return a digest of plain values in any containers; `None` where something else is among them."""
    try:
        data = marshal.dumps(content, 2)  # a later format tells which equal texts are one object
    except ValueError:
        parts = (*content.keys(), *content.values()) if isinstance(content, Mapping) else content
        if not {*map(type, parts)} <= {*CONSTANTS}:
            return None
        data = repr(content).encode("utf-8", "surrogatepass")
    return f"{len(content)} items, {_hash(data)}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _path(kind: HoldingKind, key: Any, position: int) -> str:
    return f".{key}" if kind.form == "callable" else f"[{_key(key, position)}]"


def _key(key: Any, position: int) -> str:
    """Return the name of a key; that of an object would have its address."""
    return repr(key) if _is_plain(key) else f"key {position}"
