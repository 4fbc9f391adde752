"""Replacing an attribute of a foreign class or module for the length of a measurement, and leaving modes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

_ORIGINAL = "_acbench_original"


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set `owner.name` to `value` inside the scope and put back exactly what was there.

    An attribute that `owner` only inherited is deleted again, so that nothing of the measurement stays.
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Inside the scope, a call of `owner.name` calls `around` with the original and then the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    vars(call)[_ORIGINAL] = original
    with replaced(owner, name, call):
        yield


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect no cycles of garbage inside the scope."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LeavesCompiled:
    """A dispatch mode with which compiled functions run as they do without it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true: else `torch.compile` would let the original function run in place of what it made."""
        return True


def outside_of_modes(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `original` outside of all dispatch modes, as `wrapped` takes it."""
    with _disable_current_modes():
        return original(*args, **kwargs)


@contextmanager
def outside_of_function_modes() -> Iterator[None]:
    """Leave all function modes inside the scope."""
    with ExitStack() as left:
        for _ in _get_current_function_mode_stack():
            left.enter_context(_pop_mode_temporarily())
        yield


def original_of(function: Any) -> Any:
    """Return what measurements have wrapped; `function` itself where none has."""
    while _ORIGINAL in getattr(function, "__dict__", ()):
        function = vars(function)[_ORIGINAL]
    return function


class Wrappings:
    """Functions that a measurement has replaced, and can put back for the length of a call."""

    def __init__(self) -> None:
        self._scopes: list[Callable[[], AbstractContextManager[Any]]] = []
        self._entered = ExitStack()
        self._lifts = 0

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Wrap `owner.name` as `wrapped` does, until `close`."""
        self.enter(partial(wrapped, owner, name, around))

    def enter(self, scope: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what `scope` makes, until `close`; it is made anew whenever it has been lifted."""
        self._scopes.append(scope)
        if not self._lifts:
            self._entered.enter_context(scope())

    def close(self) -> None:
        """Put back everything."""
        self._scopes.clear()
        self._entered.close()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Put back everything inside the scope; scopes within one another are one."""
        self._entered.close()
        self._lifts += 1
        try:
            yield
        finally:
            self._lifts -= 1
            for scope in self._scopes if not self._lifts else ():
                self._entered.enter_context(scope())


def is_frozen() -> bool:
    """Return whether what lives here is frozen, as a fork server freezes it for its children."""
    # it froze this module, too; to count what is frozen there takes 40 ms of a child
    is_found = any(each is Wrappings for each in gc.get_objects())
    return not is_found or gc.get_freeze_count() > 0
