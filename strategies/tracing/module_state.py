"""State besides tensors' values: attributes of modules, and the random number generators.

A recording treats the attributes that a forward reads as constants. It does not repeat changes of
attributes or generators. Comparing the state before and after finds both.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from strategies import generators
from strategies.estimate.anatomy import attributes, is_closed, kind_of

CONSTANTS = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device)
"""Types that a graph holds as they are, besides tensors, and containers and slices of these."""

LISTENER = "_acbench_listener"
"""The attribute of a shadow's module that says who is told of its calls."""

BOOKKEEPING = frozenset(
    {LISTENER, "_non_persistent_buffers_set", *(name for name in vars(nn.Module()) if "hooks" in name)}
)
"""Attributes of every module that are not of its forward."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that have the hooks around its calls."""

_GROUPS = ("_parameters", "_buffers", "_modules")
_UNWATCHED = BOOKKEEPING.union(_GROUPS)
_VALUES = (*CONSTANTS, bytes, range, slice)
_OPAQUE = (nn.Module, type, ModuleType)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType)
"""What may hold state of others: methods their object, functions within functions what they enclose."""

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
"""Types of what long containers hold, which is not looked at one by one."""
_OPEN = frozenset({"argparse", "collections", "enum", "functools", "types"})
_CLOSED = (sys.stdlib_module_names | {"torch"}) - _OPEN
"""Packages whose objects are not looked into: loggers, locks, device meshes."""

_FIRST_SEED = 2**40  # no user's


class ByIdentity:
    """An object that equals itself only, and that lives as long as it is compared with."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(
    value: Any, of_torch: Callable[[Any], object] = ByIdentity, seen: dict[int, Any] | None = None
) -> object:
    """Return `value` as it is now, to be compared with what it is later.

    Args:
        value: constants, arrays and generators are compared by value, containers by what they hold,
            functions by identity and what they hold, objects of torch by identity, other objects by identity
            and attributes.
        of_torch: what is compared of a tensor or a module.
        seen: containers and objects, by `id`, that have been looked into.
    """
    if isinstance(value, Tensor | nn.Module):
        return of_torch(value)
    if isinstance(value, _VALUES):  # a zero has a sign, and a NaN equals itself here
        return type(value), repr(value) if isinstance(value, float | complex) else value
    seen = {} if seen is None else seen
    if isinstance(value, _OPAQUE) or id(value) in seen:
        return ByIdentity(value)
    seen[id(value)] = value  # an `id` is only its own while it lives
    if isinstance(value, _FUNCTIONS):
        kind = kind_of(value)
        assert kind is not None, "functions are called"
        held = _frozen_items(kind.read(value).items(), of_torch, seen)
        # a bound method is made anew whenever it is asked for
        return ByIdentity(value) if isinstance(value, FunctionType) else value.__name__, held
    for types, content in _CONTENTS:
        if isinstance(value, types):
            return type(value), _frozen_items(content(value), of_torch, seen)
    is_closed = type(value).__module__.partition(".")[0] in _CLOSED
    return ByIdentity(value), () if is_closed else _frozen_items(attributes(value).items(), of_torch, seen)


def _frozen_items(
    items: Iterable[tuple[Any, Any]], of_torch: Callable[[Any], object], seen: dict[int, Any]
) -> object:
    """Return entries that compare by value, tensors among the keys by identity."""
    return tuple(
        (ByIdentity(key) if isinstance(key, Tensor) else key, frozen(each, of_torch, seen))
        for key, each in items
    )


def _of_an_array(value: Any) -> Iterator[tuple[str, Any]]:
    yield "kind", f"{value.dtype} {value.shape}"
    yield "values", repr(value.tolist()) if value.dtype.hasobject else value.tobytes()


_CONTENTS: tuple[tuple[Any, Callable[[Any], Iterable[tuple[Any, Any]]]], ...] = (
    (Mapping, lambda value: value.items()),
    ((list, tuple, deque), enumerate),
    ((set, frozenset), lambda value: ((each, None) for each in sorted(value, key=hash))),
    ((np.ndarray, np.generic), _of_an_array),
    ((bytearray, memoryview, array), lambda value: [("values", bytes(value))]),
    (partial, lambda value: [("of", value.func), *enumerate(value.args), *value.keywords.items()]),
    (
        (random.Random, np.random.Generator, np.random.RandomState),
        lambda value: [("state", generators.comparable(generators.of_object(value).read()))],
    ),
)
"""What is compared of values that have no attributes, or have their content elsewhere, by type."""


def kind_of_tensor(tensor: Any) -> object:
    """Return what a recording takes for constant of a tensor that a module holds; modules as they are."""
    if isinstance(tensor, nn.Module):
        return ByIdentity(tensor)
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def has_hooks(module: nn.Module) -> bool:
    """Return whether something else than the forward happens when `module` is called."""
    return any(True for _ in hooks_of(module))


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks around the calls of `module`."""
    for name in HOOKS:
        yield from vars(module)[name].values()


def is_capture(hook: Any) -> bool:
    """Return whether a hook is one of those with which `transformers` collects hidden states.

    It leaves the call as it is, and collects on a shadow what it would on the model. It is there once
    somebody has asked for hidden states.
    """
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def makes_weight(hook: Any) -> bool:
    """Return whether a hook is one of torch's that make a module's weight before each of its calls."""
    return isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm)


def held_by(module: nn.Module, name: str, otherwise: Any = None) -> Any:
    """Return what `module` itself, not its class, holds under `name`; `otherwise` where it holds nothing."""
    own = vars(module)
    if name in own:
        return own[name]
    for group in _GROUPS:  # asked for at every call of every program: nothing is made for it
        if name in own[group]:
            return own[group][name]
    return otherwise


@contextmanager
def restored_generators(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave all generators of random numbers as they were, those that modules hold included."""
    own = [generators.of_object(each).now() for each in _generators_of(modules)]
    with generators.restored():
        try:
            yield
        finally:
            generators.put(own)


def _generators_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the generators among the attributes of modules, and in what these hold, each once."""
    found = [value for module in modules for name, value in vars(module).items() if name not in _UNWATCHED]
    seen = set[int]()
    for value in found:  # grows
        if id(value) in seen or isinstance(value, (*_VALUES, *_OPAQUE, Tensor, np.ndarray)):
            continue
        seen.add(id(value))
        kind = kind_of(value)
        if kind is None:
            found += () if is_closed(value) else attributes(value).values()
        elif kind.form == "generator":
            yield value
        else:
            parts = [part for _, part in kind.parts(kind.read(value))]
            found += () if _PLAIN.issuperset(map(type, parts)) else parts


class SideEffects:
    """Side effects of code on modules and generators, from one look to the next, while tensors are fake.

    Fake tensors draw no random numbers. So the generator of torch can get a seed at every look, and has
    another one at the next look only where the code has set it, or has set it back.

    The first look is `forgive("")`.

    Args:
        modules: modules whose attributes are watched, by FQN.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._attributes: dict[str, dict[str, object]] = {}
        self._objects: dict[int, tuple[str, Any, object]] = {}
        self._seed = _FIRST_SEED
        self._drawn: list[generators.State] = []

    def seeding(self) -> str | None:
        """Return a phrase for what was done to torch's generator since the latest look; `None` for none."""
        if torch.initial_seed() != self._seed:
            return "sets torch's random number generator"
        self._reseed()
        return None

    def found(self, below: str) -> str | None:
        """Return a phrase for the first effect since the latest look; `None` for none.

        Args:
            below: FQN of the module whose attributes, and whose submodules', are compared.
        """
        if generators.moved(self._drawn):
            return "draws random numbers that are not torch's"
        changed = next(self.changes(below), None)
        return self.seeding() if changed is None else changed[1]

    def changes(self, below: str) -> Iterator[tuple[str, str]]:
        """Yield the FQN of each module whose attributes have changed since the latest look, and a phrase.

        Args:
            below: FQN of the module whose attributes, and whose submodules', are compared.
        """
        for fqn in self._below(below):
            before, now = self._attributes[fqn], _marks(self._modules[fqn])
            for name in before | now:
                if before.get(name) != now.get(name):
                    yield fqn, f"sets {_joined(fqn, name)!r}"
        for where, value, before_it in self._objects.values():
            if frozen(value) != before_it:
                yield where.rpartition(".")[0], f"changes what {where!r} holds"

    def forgive(self, below: str) -> None:
        """Take what `below` and its submodules hold, all objects, and the generators, as they are now."""
        for fqn in self._below(below):
            self._attributes[fqn] = _marks(self._modules[fqn])
            for name, value in vars(self._modules[fqn]).items():
                if name not in _UNWATCHED and not isinstance(value, (*CONSTANTS, *_OPAQUE, Tensor)):
                    self._objects.setdefault(id(value), (_joined(fqn, name), value, None))
        self._objects = {key: (*each[:2], frozen(each[1])) for key, each in self._objects.items()}
        self._drawn = [generators.PYTHON.now(), generators.NUMPY.now()]
        self._reseed()

    def _below(self, below: str) -> list[str]:
        return [fqn for fqn in self._modules if not below or fqn == below or fqn.startswith(f"{below}.")]

    def _reseed(self) -> None:
        self._seed += 1
        torch.default_generator.manual_seed(self._seed)


def _joined(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _marks(module: nn.Module) -> dict[str, object]:
    return {
        name: (type(value), value) if isinstance(value, CONSTANTS) else ByIdentity(value)
        for group in (vars(module), *(vars(module)[each] for each in _GROUPS))
        for name, value in group.items()
        if name not in _UNWATCHED
    }
