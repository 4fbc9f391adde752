"""Listeners to a forward: to torch's functions, and to the calls of some modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from strategies.nested.labels import Target

_INTERCEPTED = "_compiled_call_impl"
"""The attribute of a module that torch calls in place of its forward and hooks, where it is set."""

_GETTERS = """shape dtype device ndim requires_grad grad grad_fn layout is_leaf is_cuda is_cpu is_meta
    is_sparse itemsize is_nested is_quantized _base _version _grad _grad_fn"""
_METHODS = """size dim numel nelement stride item tolist is_contiguous is_floating_point is_complex
    data_ptr backward register_hook retain_grad element_size ndimension storage_offset untyped_storage
    __len__ numpy"""
_UNTOLD = frozenset(
    [getattr(Tensor, name).__get__ for name in _GETTERS.split() if hasattr(Tensor, name)]
    + [getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)]
    + [torch.autograd.grad, torch.autograd.backward]
)
"""Functions without results to repeat: what they return is a constant, or is kept as it is."""


class Listener(TorchFunctionMode):
    """Is told, in the backward or outside of all where it was made, of what nothing inside of a call does.

    Args:
        targets: modules whose calls are told.
    """

    def __init__(self, targets: Collection[Target]) -> None:
        super().__init__()
        self._targets = targets
        self._task = running_backward()
        self._is_quiet = self._is_away = False

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _call(self, target: Target, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a module's call, which `body` runs; nothing in it is told."""
        raise NotImplementedError

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Be told of what happens inside of the block."""
        with ExitStack() as stack:
            for target in self._targets:
                stack.callback(_intercept(target.module, partial(self._called, target)))
            stack.enter_context(self)
            yield

    def aside(self) -> AbstractContextManager[None]:
        """Return a block in which nothing is told: neither of what a module does nor of this code."""
        return _Aside(self)

    def leave(self) -> None:
        """Be told nothing from now on."""
        self._is_quiet = True
        if _get_current_function_mode() is self:
            _pop_mode()
            self._is_away = True

    def come_back(self) -> None:
        """Be told again."""
        if self._is_away:
            _push_mode(self)
        self._is_quiet = self._is_away = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Be told again inside of the block, which lies in one aside."""
        is_away, self._is_away, self._is_quiet = self._is_away, False, False
        if is_away:
            _push_mode(self)
        try:
            yield
        finally:
            if is_away:
                _pop_mode()
            self._is_away, self._is_quiet = is_away, True

    def is_told(self) -> bool:
        """Say whether what happens now is told."""
        return not self._is_quiet and self._task == running_backward()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell of a call of a function, unless it is none of the forward's."""
        kwargs = kwargs or {}
        if func in _UNTOLD or not self.is_told() or torch._C._are_functorch_transforms_active():  # noqa: SLF001
            return func(*args, **kwargs)
        return self._function(func, args, kwargs)

    def _called(self, target: Target, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        has_left = self not in _get_current_function_mode_stack()  # a proof of chunks leaves all modes
        if has_left or not self.is_told():
            return body(*args, **kwargs)
        with _Aside(self):
            return self._call(target, body, args, kwargs)


class _Aside(AbstractContextManager[None]):
    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        self._listener.leave()

    def __exit__(self, *_: object) -> None:
        self._listener.come_back()


def running_backward() -> int:
    """Return the number of the backward in which this code runs; -1 outside of all."""
    return torch._C._current_graph_task_id()  # noqa: SLF001 (nothing public tells)


def _intercept(module: nn.Module, called: Callable[..., Any]) -> Callable[[], None]:
    """Have `called` run the calls of `module`, given what would run them; return what ends that."""
    attributes = vars(module)
    before = attributes.get(_INTERCEPTED)
    attributes[_INTERCEPTED] = partial(called, module._call_impl if before is None else before)  # noqa: SLF001

    def end() -> None:
        if before is None:
            del attributes[_INTERCEPTED]
        else:
            attributes[_INTERCEPTED] = before

    return end
