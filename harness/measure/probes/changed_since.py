"""State that is another one when backward begins than when a module's forward found it.

A recomputation that reads it reads something else. The plain model tells, at the price of one forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.measure.parity.checksum import checksum
from harness.measure.parity.module_state import hooks_of
from harness.measure.rng import seeded
from harness.measure.trainee import Trainee
from strategies.estimate.anatomy import CONSTANTS, attributes, is_closed, kind_of
from strategies.estimate.outer_state import places_of
from strategies.estimate.tensors import held_by, tensors_held_by

_OWN = frozenset(vars(nn.Module())) - {"training"}
_FOREIGN = ("torch", "harness", "strategies")
_DEEPEST = 5
"""Objects one inside another in an argument: a cache holds layers, and these hold tensors."""

_MOST_ITEMS = 100
"""Items of a container that are looked at."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """One piece of state that changed after it was read, or that a backward pass moves.

    Fields:
        kind: `mode`, `word`, `attribute`, `iterator`, `buffer`, `weight`, `input` (a tensor), `argument`
            (anything else that is given), `global`, `context`, `autocast`, `hook`, or `gradient hook` of a
            weight.
        name: path of it; of a global its name.
    """

    kind: str
    name: str


def changed_since(
    trainee: Trainee, batch: Any, *, seed: int, device: torch.device, dp_rank: int = 0
) -> tuple[StateChange, ...]:
    """Return what changes between the forward of a module and the end of that of the model.

    Args:
        trainee: a fresh plain model; it takes one forward.
        batch: what it reads, on `device`.
        seed: seed of what the step draws.
        dp_rank: index of the rank's batch among all data-parallel ones.
    """
    ledger = _Ledger(trainee.model)
    with ExitStack() as stack:
        for fqn, module in trainee.model.named_modules():
            handle = module.register_forward_pre_hook(ledger.noting(fqn), with_kwargs=True)
            stack.callback(handle.remove)
        with seeded(seed, step=0, dp_rank=dp_rank, device=device):
            trainee.forward(batch)
            return tuple(ledger.changes())


class _Ledger:
    """Values that modules found, and how to read them again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = places_of(model)
        self._found: defaultdict[tuple[StateChange, int], set[Any]] = defaultdict(set)
        self._again: dict[tuple[StateChange, int], Callable[[], Any]] = {}
        self._held: dict[str, frozenset[str]] = {}

    def noting(self, fqn: str) -> Callable[..., None]:
        """Return a hook that notes what the module called `fqn` finds at each call."""

        def note(module: nn.Module, inputs: Any, keywords: Any) -> None:
            self._held.setdefault(fqn, frozenset(vars(module)))
            for change, read in (*_own(module, fqn), *self._outer(), *_given(module, fqn, inputs, keywords)):
                found = read()
                # another call has other inputs
                key = change, id(found) if change.kind in ("input", "argument") else 0
                self._found[key].add(_mark_of(change.kind, found))
                self._again.setdefault(key, read)

        return note

    def changes(self) -> Iterator[StateChange]:
        """Yield what is another one now."""
        for key, marks in self._found.items():
            change, _ = key
            if change.kind == "iterator" or marks != {_mark_of(change.kind, self._again[key]())}:
                yield change
        modules = dict(self._model.named_modules())
        for fqn, names in self._held.items():
            for name in vars(modules[fqn]).keys() - names:
                yield StateChange("attribute", f"{fqn}.{name}".removeprefix("."))
        for name, weight in self._model.named_parameters():
            if weight._post_accumulate_grad_hooks or weight._backward_hooks:  # type: ignore[attr-defined]  # noqa: SLF001 (no public name)
                yield StateChange("gradient hook", name)

    def _outer(self) -> Iterator[tuple[StateChange, Callable[[], Any]]]:
        for place in self._places:
            kind = "context" if isinstance(place.get(), ContextVar) else "global"
            yield StateChange(kind, str(place)), place.get
        yield StateChange("autocast", "autocast"), _autocast


def _own(module: nn.Module, fqn: str) -> Iterator[tuple[StateChange, Callable[[], Any]]]:
    prefix = f"{fqn}." if fqn else ""
    for name, value in vars(module).items():
        if name not in _OWN and not name.startswith(("_acbench", "_fsdp", "_is_fsdp", "_ddp")):
            yield StateChange(_kind(name, value), prefix + name), partial(vars(module).get, name)
            yield from _of_object("attribute", prefix + name, value)
    for kind, entries in (("weight", module._parameters), ("buffer", module._buffers)):  # noqa: SLF001 (as they are)
        for name in entries:
            yield StateChange(kind, prefix + name), partial(entries.get, name)
    for name, hook in hooks_of(module):
        yield StateChange("hook", prefix + name), partial(_itself, hook)
        yield from _of_object("hook", prefix + name, hook)


def _of_object(kind: str, name: str, value: Any) -> Iterator[tuple[StateChange, Callable[[], Any]]]:
    """Yield what an object of the model's own holds, such as its configuration or a hook that counts."""
    is_opaque = isinstance(value, (nn.Module, Tensor, ModuleType, type, *CONSTANTS)) or is_closed(value)
    package = type(value).__module__.partition(".")[0]
    if is_opaque or kind_of(value) is not None or package in _FOREIGN:
        return
    for key in attributes(value):
        if not key.startswith("__"):
            yield StateChange(kind, f"{name}.{key}"), partial(_attribute, value, key)


def _attribute(value: Any, key: str) -> Any:
    return attributes(value).get(key)


def _given(
    module: nn.Module, fqn: str, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Iterator[tuple[StateChange, Callable[[], Any]]]:
    owner = fqn or "the model"
    for place, tensor in enumerate(tensors_held_by((inputs, keywords))):
        yield StateChange("input", f"input {place} of {owner}"), partial(_itself, tensor)
    for name, value in _by_name(module, inputs, keywords):
        if isinstance(value, (*CONSTANTS, Tensor, nn.Module)) or callable(value) or _is_fixed(value):
            continue
        kind = "iterator" if isinstance(value, Iterator) else "argument"
        yield StateChange(kind, f"argument {name!r} of {owner}"), partial(_itself, value)


def _is_fixed(value: Any) -> bool:
    """Return whether a value is a tuple that holds tensors, which are inputs, and what nobody can change."""
    return isinstance(value, tuple) and all(isinstance(each, (*CONSTANTS, Tensor)) for each in value)


def _by_name(
    module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    for place, value in enumerate(inputs):
        yield names[place] if place < len(names) else str(place), value
    yield from keywords.items()


def _itself(value: Any) -> Any:
    return value


def _kind(name: str, value: Any) -> str:
    if name == "training":
        return "mode"
    if isinstance(value, str):
        return "word"
    is_moved = isinstance(value, Iterator) and not isinstance(value, itertools.count)
    return "iterator" if is_moved else "attribute"


def _autocast() -> Any:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _mark_of(kind: str, value: Any) -> Any:
    """Return what tells whether state of one kind is another one later; arguments are read to their depth."""
    return _mark_of_object(value, _DEEPEST) if kind == "argument" else _mark(value)


def _mark_of_object(value: Any, depth: int) -> Any:
    """Return the mark of a value with those of all that it holds, which is how a cache changes."""
    kind = kind_of(value)
    is_one = isinstance(value, (Tensor, nn.Module, ModuleType, type)) or (kind and kind.form == "generator")
    holds = held_by(value) if depth and not is_one else None
    if not holds:
        return _mark(value, 1), 0 if holds is None else len(holds)
    return tuple(
        (key, _mark_of_object(part, depth - 1)) for key, part in itertools.islice(holds.items(), _MOST_ITEMS)
    ), len(holds)


def _mark(value: Any, depth: int = 3) -> Any:
    """Return what tells whether a value is another one later, and can be hashed."""
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version  # noqa: SLF001 (autograd's own count)
        # autograd counts no writes through `.data`
        content = checksum(value) if type(value) in (Tensor, nn.Parameter) and not value.is_meta else 0
        return "tensor", id(value), version, content
    if isinstance(value, ContextVar):
        return _mark(value.get(None), depth)
    if isinstance(value, CONSTANTS):
        return repr(value)
    kind = kind_of(value) if depth else None
    if kind is None:
        return "object", id(value)
    code = id(value.__code__) if isinstance(value, FunctionType) else 0
    return code, _mark_of_content(kind.read(value), kind.form, depth)


def _mark_of_content(content: Any, form: str, depth: int) -> Any:
    if isinstance(content, np.ndarray) and not content.dtype.hasobject:
        return content.shape, content.tobytes()  # its repr leaves out the middle
    if form in ("buffer", "generator"):
        return repr(content.tolist() if isinstance(content, Tensor) else content)
    items = content.items() if isinstance(content, Mapping) else enumerate(content)
    return len(content), tuple(
        (repr(key), _mark(item, depth - 1)) for key, item in itertools.islice(items, _MOST_ITEMS)
    )
