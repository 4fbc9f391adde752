"""State of modules outside of parameters and buffers: attributes, and what `get_extra_state` returns.

Recomputation runs a forward once more, and what it counts, caches or draws is then counted, cached or drawn
twice.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, deque)
_OURS = "_acbench"
"""Attributes that a strategy puts on modules begin so; the plain model has none."""
_MOST_ITEMS = 64
"""Items of a container that are compared one by one; of a larger one the length is."""
_DEEPEST = 4
_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)
_OWN = frozenset(vars(nn.Module())) - {"training"}
_FOREIGN = ("torch", "harness", "strategies")
"""Packages whose objects hold bookkeeping of their own."""


def module_state(model: nn.Module) -> dict[str, Any]:
    """Return tensors, numbers, texts and lengths that the modules of `model` hold, by path.

    Walked are containers, generators of random numbers, and plain objects of users' classes, to a depth of
    four. A container has its length beside its items. Other objects are left out.
    """
    found: dict[str, Any] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, _WRAPPERS):
            found.update(_state_of(fqn, module))
    return found


class StateChanges:
    """Tells what of the state of `model` has changed since this was made.

    What two models were told apart by before their first step, such as a flag that turns checkpointing on, is
    no result of a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: _mark(value) for name, value in module_state(model).items()}

    def names(self, state: Mapping[str, Any]) -> frozenset[str]:
        """Return the names in `state`, or gone from it, whose values are others than before."""
        kept = {name for name, value in state.items() if self._is_as_before(name, value)}
        return frozenset((state.keys() | self._before.keys()) - kept)

    def _is_as_before(self, name: str, value: Any) -> bool:
        return name in self._before and _is_same(self._before[name], _mark(value))


def _mark(value: Any) -> Any:
    """Return what tells whether a value is another one later; a tensor is known by its writes."""
    if not isinstance(value, Tensor):
        return value
    return value, 0 if value.is_inference() else value._version  # noqa: SLF001 (autograd's own count)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is other[0] and one[1] == other[1]
    return type(one) is type(other) and bool(one == other)


def _state_of(fqn: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    prefix = f"{fqn}." if fqn else ""
    for name, value in list(vars(module).items()):
        if name not in _OWN and not _is_bookkeeping(name):
            yield from _walk(value, prefix + name, depth=0, above=frozenset({id(module)}))
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield from _walk(module.get_extra_state(), f"{prefix}(extra state)", depth=0, above=frozenset())


def _is_bookkeeping(name: str) -> bool:
    return name.startswith((_OURS, "_fsdp", "_is_fsdp", "_ddp", "__"))


def _walk(value: Any, name: str, *, depth: int, above: frozenset[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (*_NUMBERS, Tensor)):
        if not isinstance(value, Tensor) or _has_memory(value):
            yield name, value
        return
    if isinstance(value, np.ndarray | np.generic):
        yield name, torch.from_numpy(np.array(value)) if value.dtype.kind in "biufc" else str(value)
        return
    if isinstance(value, torch.Generator | random.Random | np.random.Generator):
        yield name, _generator_state(value)
        return
    if depth == _DEEPEST or id(value) in above:
        return
    children = _children(value, name)
    if children is None:
        return
    if isinstance(value, (*_LISTS, set, frozenset, Mapping)):
        yield f"length of {name}", len(value)
    for child_name, child in children.items():
        yield from _walk(child, child_name, depth=depth + 1, above=above | {id(value)})


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor can be read: FSDP1 leaves views of storages that it has freed in attributes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if local.is_meta or local.layout is not torch.strided or local.numel() == 0:
        return not local.is_meta
    return local.untyped_storage().nbytes() > 0


def _generator_state(generator: Any) -> Any:
    """Return the state of a generator as a tensor, or a digest of it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    state = generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state
    return f"generator {hashlib.sha256(str(state).encode()).hexdigest()[:12]}"


def _children(value: Any, name: str) -> dict[str, Any] | None:
    """Return what `value` holds by path; `None` where it holds nothing that is compared."""
    if isinstance(value, set | frozenset):
        return {}
    if isinstance(value, _LISTS):
        return {f"{name}[{index}]": item for index, item in enumerate(value)} if _is_short(value) else {}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": item for key, item in value.items()} if _is_short(value) else {}
    return {f"{name}.{key}": item for key, item in vars(value).items()} if _is_plain_object(value) else None


def _is_short(value: Any) -> bool:
    return len(value) <= _MOST_ITEMS


def _is_plain_object(value: Any) -> bool:
    """Whether an object of a user's class has attributes of its own to compare."""
    if isinstance(value, nn.Module | type | ModuleType) or inspect.isroutine(value):
        return False
    if not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN
