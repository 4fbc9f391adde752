"""Guards of recorded programs, each of which can be switched off, to see whether it is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

from torch import nn

from strategies.chunk.running import chunked_forward, runtime
from strategies.chunk.running.proof import Subject
from strategies.tracing import guard
from strategies.tracing.module_state import HOOKS, held_by

_OF_MODULES = frozenset({"_modules"})

_Read: TypeAlias = Callable[[nn.Module, str], bool]


@contextmanager
def _unread(is_meant: _Read) -> Iterator[None]:
    """Let guards take every value of some attributes for the one that was recorded."""
    plain = guard._value_read

    def read(module: nn.Module, name: str, of_torch: Callable[[Any], object]) -> object:
        return None if is_meant(module, name) else plain(module, name, of_torch)

    with mock.patch.object(guard, "_value_read", read):
        yield


@contextmanager
def _anonymous_inputs() -> Iterator[None]:
    """Let guards not see which inputs are one tensor, nor which are the module's own."""
    plain = guard._values_read

    def read(module: nn.Module, _: Any, places: Any, *, is_exact: bool) -> Any:
        return plain(module, (), places, is_exact=is_exact)

    with mock.patch.object(guard, "_values_read", read):
        yield


@contextmanager
def _all_kinds(*names: str) -> Iterator[None]:
    """Let programs run for calls that differ in these parts of their kind."""
    of: Callable[..., guard.Call] = guard.Call.of
    parts = ("structure", "kinds", "same", "switches")

    def coarse(_: type[guard.Call], where: str, args: Any, kwargs: Any) -> guard.Call:
        call = of(where, args, kwargs)
        kept = zip(parts, call.kind, strict=True)  # type: ignore[call-overload]
        return replace(call, kind=tuple(kind for part, kind in kept if part not in names))

    with mock.patch.object(guard.Call, "of", classmethod(coarse)):
        yield


@contextmanager
def _together(*makers: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make())
        yield


def _is_hooks(_: nn.Module, name: str) -> bool:
    return name in HOOKS


def _is_forward(_: nn.Module, name: str) -> bool:
    return name == "forward"


def _is_module(module: nn.Module, name: str) -> bool:
    return name in _OF_MODULES or isinstance(held_by(module, name), nn.Module)


def _is_mode(_: nn.Module, name: str) -> bool:
    return name == "training"


def _is_attribute(module: nn.Module, name: str) -> bool:
    others = (_is_hooks, _is_forward, _is_module, _is_mode)
    return not any(other(module, name) for other in others)


def _is_unseen(*_: Any) -> None:
    """Refuse nothing."""


def _kept_by_nobody(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Leave the state of a model to what is recorded of it."""
    return nullcontext()


_NO_REFUSALS = partial(mock.patch.object, chunked_forward, "refuse_unseen", _is_unseen)
_ANY_RESULT = partial(mock.patch.object, runtime, "kind_of_result", lambda _: mock.ANY)

GUARDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "aliasing": partial(_together, partial(_all_kinds, "same"), _anonymous_inputs),
    "hooks": partial(_together, partial(_unread, _is_hooks), _NO_REFUSALS),
    "patched forward": partial(_together, partial(_unread, _is_forward), _NO_REFUSALS),
    "submodules": partial(
        _together, partial(_unread, _is_module), partial(_unread, _is_forward), _ANY_RESULT
    ),
    "attributes": partial(_unread, _is_attribute),
    "proof": partial(
        _together,
        partial(mock.patch.object, Subject, "prove"),
        partial(mock.patch.object, chunked_forward, "python_state_kept", _kept_by_nobody),
    ),
    "modes": partial(_together, partial(_all_kinds, "switches"), partial(_unread, _is_mode)),
}
"""By name, what switches off a guard while it is entered."""
