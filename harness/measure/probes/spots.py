"""Everything besides its inputs that a recomputation could read, and how to change it until backward is over.

Numbers, flags, words, modes, buffers and other tensors of modules, with what containers, plain objects and
functions among them and people's hooks hold; attributes of classes, and globals that methods name; context
variables; generators. Weights are left out: every recomputation reads them.

Of torch's own modules only modes, buffers and fractions are changed, such as the probability of dropout: a
kernel that gets another dimension or size than its module was made for may write out of its bounds.

A tensor is not written: another one takes its place, so that what autograd has saved keeps its values.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.measure.parity.module_state import hooks_of
from strategies import generators
from strategies.estimate.anatomy import attributes, is_closed, kind_of
from strategies.estimate.outer_state import Place, places_of

KINDS = ("context", "generator", "global", "mode", "word", "flag", "buffer", "number", "size")
"""Kinds of state, that which training code is likelier to change before. `size` is every integer."""

_OWN = frozenset(vars(nn.Module())) - {"training"}
_BOOKKEEPING = ("_acbench", "_fsdp", "_is_fsdp", "_ddp", "_dynamo", "__")
_FOREIGN = ("torch", "harness", "strategies")
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)
_DEEPEST = 3
_MOST_ITEMS = 32
"""Items of a container that are changed."""

Undo = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spot:
    """One piece of state.

    Fields:
        kind: one of `KINDS`.
        name: path of it; of a global its name.
        attribute: the path without the module, the same in all modules of a kind.
        change: makes it another one, and returns what puts it back.
    """

    kind: str
    name: str
    attribute: str
    change: Callable[[], Undo]


def spots_of(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[Spot]:
    """Yield each piece of state once.

    Args:
        model: the model, whose classes and their globals are looked at.
        modules: its modules by the names of the plain model.
    """
    yield Spot("generator", "random", "random", _drawing(generators.PYTHON, random.random))
    numpy = _drawing(generators.NUMPY, np.random.rand)
    yield Spot("generator", "numpy.random", "numpy.random", numpy)
    walk = _Walk()
    for fqn, module in modules.items():
        yield from walk.module(module, prefix=f"{fqn}." if fqn else "")
    for place in places_of(model):
        value = place.get()
        if isinstance(value, ContextVar):
            yield from _context(value, str(place))
        elif kind_of(value) is not None:
            yield from walk.inside(value, prefix="", path=str(place), depth=1, kind="global")
        else:
            yield from _global(place, value)


class _Walk:
    """Goes through containers and objects, each once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def module(self, module: nn.Module, *, prefix: str) -> Iterator[Spot]:
        """Yield the spots of a module itself: attributes, buffers, hooks."""
        own = vars(module)
        is_torchs = all(_is_torchs(owner) for owner in type(module).__mro__)
        for name, value in list(own.items()):
            if is_torchs and name != "training" and type(value) is not float:
                continue  # its kernels trust a `dim` that its constructor has looked at
            if name not in _OWN and not name.startswith(_BOOKKEEPING):
                yield from self.spots(own, name, value, prefix=prefix, path=name)
        buffers = module._buffers  # noqa: SLF001 (as they are)
        for name, buffer in buffers.items():
            if isinstance(buffer, Tensor):
                yield from self.spots(buffers, name, buffer, prefix=prefix, path=name)
        for name, hook in hooks_of(module):
            yield from self.inside(hook, prefix=prefix, path=name, depth=1, kind="")

    def spots(
        self, holder: Any, key: Any, value: Any, *, prefix: str, path: str, depth: int = 0, kind: str = ""
    ) -> Iterator[Spot]:
        """Yield the spot at `holder[key]`, or those inside of what is there."""
        other = _other(value, holder)
        if other is not None:
            yield Spot(kind or _kind(key, value), prefix + path, path, _putting(holder, key, value, other))
        elif depth < _DEEPEST and id(value) not in self._seen:
            self._seen[id(value)] = value  # an `id` is only its own while it lives
            yield from self.inside(value, prefix=prefix, path=path, depth=depth + 1, kind=kind)

    def inside(self, value: Any, *, prefix: str, path: str, depth: int, kind: str) -> Iterator[Spot]:
        """Yield the spots in a generator, a container or an object."""
        form = kind_of(value)
        if form is not None and form.form == "generator":
            yield Spot("generator", prefix + path, path, _drawing_from(value))
        elif isinstance(value, list | dict):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            for key, part in items[:_MOST_ITEMS]:
                yield from self.spots(
                    value, key, part, prefix=prefix, path=f"{path}[{key!r}]", depth=depth, kind=kind
                )
        elif _is_plain(value):
            holder = _Holder(functools.partial(object.__setattr__, value), attributes(value))
            yield from self._named(holder, prefix=prefix, path=path, depth=depth, kind=kind)
        elif form is not None and form.form == "callable":
            yield from self._enclosed(value, prefix=prefix, path=path, depth=depth, kind=kind)

    def _enclosed(self, value: Any, *, prefix: str, path: str, depth: int, kind: str) -> Iterator[Spot]:
        if isinstance(value, functools.partial):
            for part in (value.func, value.keywords):
                yield from self.inside(part, prefix=prefix, path=path, depth=depth, kind=kind)
        elif isinstance(value, MethodType) and not isinstance(value.__self__, nn.Module):
            yield from self.inside(value.__self__, prefix=prefix, path=path, depth=depth, kind=kind)
        elif isinstance(value, FunctionType) and not _is_foreign(value.__module__ or ""):
            yield from self._named(_cells_of(value), prefix=prefix, path=path, depth=depth, kind=kind)

    def _named(self, holder: _Holder, *, prefix: str, path: str, depth: int, kind: str) -> Iterator[Spot]:
        for key, part in list(holder.items())[: 4 * _MOST_ITEMS]:
            if not key.startswith(_BOOKKEEPING):
                yield from self.spots(
                    holder, key, part, prefix=prefix, path=f"{path}.{key}", depth=depth, kind=kind
                )


class _Holder(dict[str, Any]):
    """The named values that an object or a function holds; they are written where they are."""

    def __init__(self, write: Callable[[str, Any], object], held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        self._write(key, value)


def _cells_of(function: FunctionType) -> _Holder:
    cells: dict[str, CellType] = dict(
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    kind = kind_of(function)
    assert kind is not None, "it is a function"

    def write(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    return _Holder(write, kind.read(function))


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _is_torchs(owner: type) -> bool:
    return owner is object or owner.__module__.partition(".")[0] == "torch"


def _is_plain(value: Any) -> bool:
    """Say whether a value is an object of a model's own, such as its configuration."""
    if isinstance(value, (*_OPAQUE, Tensor)) or is_closed(value):
        return False
    return not _is_foreign(type(value).__module__) and kind_of(value) is None and bool(attributes(value))


def _kind(key: Any, value: Any) -> str:
    if key == "training":
        return "mode"
    if isinstance(value, Tensor):
        return "buffer"
    if isinstance(value, bool):
        return "flag"
    return {str: "word", int: "size"}.get(type(value), "number")


def _other(value: Any, holder: Any = None) -> Any:
    """Return a value of the same kind that is another one; `None` where there is none."""
    if isinstance(value, Tensor):
        return _other_tensor(value)
    if isinstance(value, bool):
        return not value
    if type(value) is int:
        return value + 1
    if type(value) is float:
        inside = 0.5 * value + 0.2  # what is between 0 and 1 stays there: a probability
        return value * 1.25 + 0.25 if not 0 <= value <= 1 else inside if inside != value else 0.3
    return _other_word(value, holder) if type(value) is str else None


def _other_tensor(value: Tensor) -> Tensor | None:
    if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided:
        return None
    if not value.numel() or value.is_meta or value.is_quantized:
        return None
    with torch.no_grad():
        if value.dtype is torch.bool:
            return ~value
        if value.is_floating_point():
            ramp = torch.linspace(1, 0.125, value.numel(), dtype=value.dtype, device=value.device)
            return value * 1.25 + ramp.reshape(value.shape)  # other choices of the largest, too
        if value.is_complex():
            return value * 1.25
        rolled = value.roll(1)  # indices stay in their range
        return value + 1 if torch.equal(rolled, value) else rolled


def _other_word(value: str, holder: Any) -> str:
    """Return what a word may choose otherwise, such as another adapter; else a word without a meaning.

    A word chooses where it is a key of a mapping, or the name of a module, next to it.
    """
    own = holder if isinstance(holder, dict) else {}
    children = own.get("_modules") or {}
    for mapping in (children, *own.values(), *children.values()):
        if isinstance(mapping, dict | nn.ModuleDict) and value in mapping:
            others = [each for each in mapping if isinstance(each, str) and each != value]
            if others:
                return others[0]
    return f"{value}~"


def _putting(holder: Any, key: Any, value: Any, other: Any) -> Callable[[], Undo]:
    def change() -> Undo:
        holder[key] = other

        def undo() -> None:
            is_there = key < len(holder) if isinstance(holder, list) else key in holder
            if is_there:  # a step that ends early may have taken it out
                holder[key] = value

        return undo

    return change


def _context(variable: ContextVar[Any], name: str) -> Iterator[Spot]:
    other = _other(_found(variable))
    if other is not None:

        def change() -> Undo:
            token = variable.set(other)
            return lambda: variable.reset(token)

        yield Spot("context", name, name, change)


def _found(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()  # of `get(None)` it is None, whatever its default
    except LookupError:
        return None


def _global(place: Place, value: Any) -> Iterator[Spot]:
    other = _other(value)
    if other is not None:

        def change() -> Undo:
            place.put(other)
            return lambda: place.put(value)

        yield Spot("global", str(place), str(place), change)


def _drawing_from(generator: Any) -> Callable[[], Undo]:
    source = generators.of_object(generator)
    if isinstance(generator, torch.Generator):
        return _drawing(source, lambda: torch.rand((), generator=generator, device=generator.device))
    return _drawing(source, generator.random)


def _drawing(source: generators.Source, draw: Callable[[], object]) -> Callable[[], Undo]:
    def change() -> Undo:
        before = source.now()
        draw()
        return before.put

    return change
