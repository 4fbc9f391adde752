"""A meter of live storages for rehearsals: what a computation holds, on tensors with or without memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.estimate.liveness import hidden_bytes, numbers_bytes
from strategies.regions.host import allocating_on_host


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator makes, from birth to death.

    Host memory of offloading is left out.

    Args:
        standing: tensors whose storages are not counted.
        device: whose storages are counted.
    """

    def __init__(self, standing: Iterable[Tensor], device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._rng_state = torch.get_rng_state
        self._standing = {_key(tensor): tensor for tensor in standing}
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._on_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbers: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        torch.get_rng_state = self._follow_rng_state
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        torch.get_rng_state = self._rng_state
        super().__exit__(*exc)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` and enter what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._enter(tensor, hidden_bytes(func, tensor, args) if isinstance(tensor, FakeTensor) else 0)
        promoted = numbers_bytes(func, args)
        if promoted:
            # autograd may keep the number until backward
            self._changes += [(-1, promoted), (-1, 0 if torch.is_grad_enabled() else -promoted)]
        return result

    def peak_bytes(self, without: Iterable[Tensor] = ()) -> int:
        """Return the highest total, the storages of some tensors left out."""
        left_out: set[int] = {self._numbers[key] for key in map(_key, without) if key in self._live}
        live = peak = 0
        for number, delta in self._changes:
            if number not in left_out:
                live += delta
                peak = max(peak, live)
        return peak

    def _follow_rng_state(self) -> Tensor:
        """Return the random state of the host, which checkpoints keep and no operator makes."""
        state = self._rng_state()
        self._enter(state)
        return state

    def _enter(self, tensor: Tensor, more_bytes: int = 0) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (its identity)
        is_elsewhere = tensor.device.type != self._device.type or key in self._on_host
        if is_elsewhere or key in self._live or key in self._standing:
            return
        if allocating_on_host():
            self._on_host[key] = weakref.ref(storage, lambda _: self._on_host.pop(key))
            return
        number, size = len(self._changes), storage.nbytes() + more_bytes
        self._numbers[key] = number
        self._changes.append((number, size))
        self._live[key] = weakref.ref(storage, functools.partial(self._bury, key, number, size))

    def _bury(self, key: int, number: int, size: int, _: Any) -> None:
        del self._live[key]
        self._changes.append((number, -size))


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 (its identity)
    return key
