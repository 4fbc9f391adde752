"""State of torch and of classes that a model or a variant may change for everybody: kept, and put back."""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as modules

from strategies import generators

_FOREIGN = ("harness", "strategies", "builtins", "typing", "abc", "collections")
_MODELS = "harness.models."
_MOST_POPPED = 64
"""Modes and hooks that are taken off a stack; more is another program's business."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """One piece of state.

    Fields:
        read: returns it, so that two of them are equal where nothing has changed.
        write: puts back what `read` has returned.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


class GlobalState:
    """The state of this process, as it was when this was made.

    These are: default dtype and device, grad mode, autocast and its cache, deterministic algorithms, threads,
    precision of matrix products, flags of cuDNN, detection of anomalies, options of torch's checkpoint, the
    cache of parametrizations, hooks of all modules, hooks of saved tensors, modes, garbage collection; and
    functions of the classes of a model and those that these name.

    Args:
        model: its classes are looked at; `None` for none.
        files: Python modules whose functions count too.
    """

    def __init__(self, model: nn.Module | None = None, files: Sequence[ModuleType] = ()) -> None:
        self._settings = (
            *_SETTINGS,
            *(() if model is None else _patches(model)),
            *map(_functions_in, files),
        )
        self._kept: tuple[Any, ...]
        self.refresh()

    def put_back(self) -> tuple[str, ...]:
        """Make it what it was, and return the names of what was another."""
        changed = []
        for setting, kept in zip(self._settings, self._kept, strict=True):
            if not _is_same(kept, setting.read()):
                setting.write(kept)
                changed.append(setting.name)
        return tuple(changed)

    def forked(self) -> Self:
        """Return another one that begins with the same state."""
        return copy.copy(self)

    def now(self) -> Self:
        """Return another one of the same settings, as they are now."""
        fork = self.forked()
        fork.refresh()
        return fork

    def refresh(self) -> None:
        """Keep the state as it is now."""
        self._kept = tuple(setting.read() for setting in self._settings)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this state within the scope, keep what becomes of it, and leave what was there before."""
        outside = self.now()
        self.put_back()
        try:
            yield
        finally:
            self.refresh()
            outside.put_back()


@contextmanager
def ledger() -> Iterator[list[str]]:
    """Put back after the scope what it has changed, also where it raises; yield the list that names it.

    Beside settings these are the numbers of the generators of torch, Python and NumPy.
    """
    before = GlobalState()
    states = [each.now() for each in (*generators.of_torch(), generators.PYTHON, generators.NUMPY)]
    changed: list[str] = []
    try:
        yield changed
    finally:
        if not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            torch.clear_autocast_cache()
        changed += before.put_back()
        changed += (f"generator {each.source.name}" for each in generators.moved(states))
        generators.put(states)


def _is_same(one: Any, other: Any) -> bool:
    """Say whether two readings are equal; what they hold is the same object then."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return one is other or (type(one) is type(other) and bool(one == other))


def _attribute(owner: str, name: str) -> _Setting:
    """Return the setting of a name in a Python module of torch, which other releases may lack."""
    holder: Any = importlib.import_module(owner)

    def write(value: Any) -> None:
        if hasattr(holder, name):
            setattr(holder, name, value)

    return _Setting(name=f"{owner}.{name}", read=lambda: getattr(holder, name, None), write=write)


def _content(holder: Any, name: str) -> _Setting:
    def write(value: dict[Any, Any]) -> None:
        mapping = getattr(holder, name)
        mapping.clear()
        mapping.update(value)

    return _Setting(name=f"{holder.__name__}.{name}", read=lambda: dict(getattr(holder, name)), write=write)


def _autocast(device: str) -> tuple[_Setting, ...]:
    return (
        _Setting(
            name=f"torch.autocast({device!r})",
            read=lambda: torch.is_autocast_enabled(device),
            write=lambda is_on: torch.set_autocast_enabled(device, is_on),
        ),
        _Setting(
            name=f"torch.get_autocast_dtype({device!r})",
            read=lambda: torch.get_autocast_dtype(device),
            write=lambda dtype: torch.set_autocast_dtype(device, dtype),
        ),
    )


def _write_device(device: torch.device) -> None:
    # of the CPU, which is the default of the default, no mode is left
    torch.set_default_device(None if device.type == "cpu" else device)


def _read_determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _write_cached(is_on: bool) -> None:
    torch.set_autocast_cache_enabled(is_on)
    torch.clear_autocast_cache()


def _collect(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()


def _popping(length: Callable[[], Any], pop: Callable[[], object]) -> Callable[[Any], None]:
    """Return a function that takes off a stack what was not there before."""

    def write(before: Any) -> None:
        for _ in range(_MOST_POPPED):
            if _is_same(length(), before) or length() in (0, None):
                return
            pop()

    return write


_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]  # noqa: SLF001 (no public name)
_core: Any = torch._C  # noqa: SLF001 (as above)


def _top_hooks() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001 (its only argument)


_SETTINGS: tuple[_Setting, ...] = (
    # the default device is a mode, too, that has a name; other modes come next, as all below passes them
    _Setting(name="torch.set_default_device", read=torch.get_default_device, write=_write_device),
    _Setting(
        name="modes of torch functions",
        read=_core._len_torch_function_stack,  # noqa: SLF001 (no public name)
        write=_popping(_core._len_torch_function_stack, _core._pop_torch_function_stack),  # noqa: SLF001
    ),
    _Setting(
        name="modes of torch operators",
        read=_core._len_torch_dispatch_stack,  # noqa: SLF001 (no public name)
        write=_popping(_core._len_torch_dispatch_stack, _core._pop_torch_dispatch_stack),  # noqa: SLF001
    ),
    _Setting(
        name="hooks of saved tensors",
        read=_top_hooks,
        write=_popping(_top_hooks, _autograd._pop_saved_tensors_default_hooks),  # noqa: SLF001
    ),
    _Setting(name="torch.set_default_dtype", read=torch.get_default_dtype, write=torch.set_default_dtype),
    _Setting(name="torch.set_grad_enabled", read=torch.is_grad_enabled, write=torch.set_grad_enabled),
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting(
        name="torch.set_autocast_cache_enabled", read=torch.is_autocast_cache_enabled, write=_write_cached
    ),
    _Setting(
        name="torch.use_deterministic_algorithms",
        read=_read_determinism,
        write=lambda kept: torch.use_deterministic_algorithms(kept[0], warn_only=kept[1]),
    ),
    _Setting(name="torch.set_num_threads", read=torch.get_num_threads, write=torch.set_num_threads),
    _Setting(
        name="torch.set_float32_matmul_precision",
        read=torch.get_float32_matmul_precision,
        write=torch.set_float32_matmul_precision,
    ),
    _Setting(
        name="torch.autograd.set_detect_anomaly",
        read=torch.is_anomaly_enabled,
        write=torch.autograd.set_detect_anomaly,
    ),
    *(_attribute("torch.backends.cudnn", name) for name in ("enabled", "benchmark", "deterministic")),
    *(
        _attribute("torch.utils.checkpoint", name)
        for name in ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled")
    ),
    _attribute("torch.nn.utils.parametrize", "_cache_enabled"),
    _content(importlib.import_module("torch.nn.utils.parametrize"), "_cache"),
    *(
        _content(modules, name)
        for name, value in vars(modules).items()
        if name.startswith("_global") and isinstance(value, dict)
    ),
    _Setting(name="gc.enable", read=gc.isenabled, write=_collect),
)


def _patches(model: nn.Module) -> Iterator[_Setting]:
    classes = {owner for module in model.modules() for owner in type(module).__mro__ if owner is not object}
    files: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for owner in sorted(classes, key=lambda each: (each.__module__, each.__qualname__)):
        package = owner.__module__.partition(".")[0]
        if package in _FOREIGN and not owner.__module__.startswith(_MODELS):
            continue
        yield _functions_of(owner)
        for function in vars(owner).values() if package != "torch" else ():
            if isinstance(function, FunctionType):
                names = files.setdefault(id(function.__globals__), (function.__globals__, set()))[1]
                names.update(function.__code__.co_names)
    for held, names in files.values():
        yield _names_in(held, frozenset(names))


def _functions_of(owner: type) -> _Setting:
    """Return the setting of the functions and properties of a class, and of what is added to it later.

    A patch often marks the class, so as not to be made twice: with the mark left, it would not be made again.
    """
    first = frozenset(vars(owner))

    def read() -> dict[str, Any]:
        named = list(vars(owner).items())
        return {name: value for name, value in named if _is_code(value) or name not in first}

    def write(kept: dict[str, Any]) -> None:
        for name in read().keys() - kept.keys():
            delattr(owner, name)
        for name, value in kept.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)

    return _Setting(name=f"functions of {owner.__module__}.{owner.__qualname__}", read=read, write=write)


def _functions_in(file: ModuleType) -> _Setting:
    """Return the setting of what can be called in a file, built in or not."""

    def read() -> dict[str, Any]:
        return {name: value for name, value in list(vars(file).items()) if callable(value)}

    def write(kept: dict[str, Any]) -> None:
        for name in read().keys() - kept.keys():
            delattr(file, name)
        vars(file).update(kept)

    return _Setting(name=f"functions of {file.__name__}", read=read, write=write)


def _names_in(held: dict[str, Any], names: frozenset[str]) -> _Setting:
    """Return the setting of the functions and classes that have `names` among the globals of a file."""

    def read() -> dict[str, Any]:
        return {name: held[name] for name in sorted(names & held.keys()) if _is_code(held[name])}

    def write(kept: dict[str, Any]) -> None:
        held.update(kept)

    return _Setting(name=f"functions of {held.get('__name__', 'a file')}", read=read, write=write)


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | property | classmethod | staticmethod | type)
