"""Holders of the tensors that forwards of a module find, and that are none of their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from strategies.estimate.outer_state import tensor_places
from strategies.regions.blocks import plain_named_modules
from strategies.regions.own_parameters import is_unit

_CONTAINERS = frozenset({dict, list, tuple})
_MOST_HELD = 64
"""Entries of a container up to which it is looked at: where modules keep tensors, they are few."""
_OF_TORCH = frozenset(vars(nn.Module()))
_NO_TENSORS = frozenset({bool, int, float, str, set, FunctionType})
"""Types of most attributes. One that is `None` may get a tensor later, as a table that is made once."""


class TensorHolders:
    """The modules and names that hold tensors, to read them fast in each forward; no module is referred to.

    Args:
        parts: it and the modules in it.
    """

    def __init__(self, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        self._kinds = _kinds_of(parts)
        has_units = any(map(is_unit, parts))  # FSDP exchanges parameters, and lends them as attributes
        self._with_parameters = [at for at, part in enumerate(parts) if part._parameters and not has_units]  # noqa: SLF001 (as they stand)
        self._with_buffers = [at for at, part in enumerate(parts) if part._buffers]  # noqa: SLF001 (as above)
        self._attributes = [
            (at, name)
            for at, part in enumerate(parts)
            for name, value in vars(part).items()
            if name not in _OF_TORCH and type(value) not in _NO_TENSORS
            if not has_units or type(value) in _CONTAINERS
        ]
        self._places = tensor_places(module)

    def are_of(self, parts: Sequence[nn.Module]) -> bool:
        """Say whether they are those of the same modules, which hold as many things as before."""
        return self._kinds == _kinds_of(parts)

    def parameters(self, parts: Sequence[nn.Module]) -> list[Tensor]:
        """Return the parameters of the modules, without those that FSDP exchanges."""
        found: list[Tensor] = []
        for at in self._with_parameters:
            found += [each for each in parts[at]._parameters.values() if each is not None]  # noqa: SLF001 (as above)
        return found

    def state(self, parts: Sequence[nn.Module]) -> list[Tensor]:
        """Return the buffers and the tensors among attributes."""
        found: list[Tensor] = []
        for at in self._with_buffers:
            found += [each for each in parts[at]._buffers.values() if each is not None]  # noqa: SLF001 (as above)
        return [*found, *(each for each in self._held(parts) if isinstance(each, Tensor))]

    def others(self, parts: Sequence[nn.Module]) -> list[Tensor]:
        """Return what functions name, and what modules hold that attributes and functions refer to."""
        named = [each for place in self._places for each in contents(place.get())]
        found = [each for each in named if isinstance(each, Tensor)]
        for each in chain(self._held(parts), named):
            if isinstance(each, nn.Module):
                found += _of_hidden(each)
        return found

    def _held(self, parts: Sequence[nn.Module]) -> list[Any]:
        return [each for at, name in self._attributes for each in contents(vars(parts[at]).get(name))]


def names_of(tensor: Tensor, module: nn.Module) -> Iterator[str]:
    """Yield the names of `tensor` in `module`."""
    for fqn, part in plain_named_modules(module):
        for held in (part._parameters, part._buffers, vars(part)):  # noqa: SLF001 (as they stand)
            for name, value in held.items():
                if name not in _OF_TORCH and any(each is tensor for each in contents(value)):
                    yield f"{fqn}.{name}" if fqn else name


def contents(value: Any) -> Iterable[Any]:
    """Return a value, or what it holds if it is a short container."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return (value,)
    if len(value) > _MOST_HELD:
        return ()
    held: Iterable[Any] = value.values() if kind is dict else value
    return held


def is_container(value: Any) -> bool:
    """Say whether a value is a list, a tuple or a dictionary."""
    return type(value) in _CONTAINERS


def _kinds_of(parts: Sequence[nn.Module]) -> tuple[list[int], list[type], list[tuple[int, int, int]]]:
    """Return which modules these are, of which classes, and how many tensors and attributes each may hold."""
    counts = [(len(part.__dict__), len(part._parameters), len(part._buffers)) for part in parts]  # noqa: SLF001 (as above)
    return list(map(id, parts)), list(map(type, parts)), counts


def _of_hidden(module: nn.Module) -> Iterator[Tensor]:
    """Yield what a module, such as the model itself, and its children hold."""
    parts = [module, *module.children()]
    has_units = any(map(is_unit, parts))
    for part in parts:
        for held in (part._buffers, {} if has_units else part._parameters):  # noqa: SLF001 (without names)
            yield from (each for each in held.values() if each is not None)
