"""Tensors that hooks of saved tensors give back in backward, against those of forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from harness.measure.parity.backward_order import edges_below
from harness.measure.parity.checksum import checksum
from harness.measure.rng import seeded
from harness.measure.trainee import Trainee

_FOREIGN = ("torch", "strategies")
_PUSH = "_push_saved_tensors_default_hooks"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedValues:
    """The tensors that one step of a model saves.

    Fields:
        unpacked: the first tensor that came back with other values, or else with other strides; empty where
            all came back as they went.
        functions: names of the autograd functions in the graph that torch does not define.
    """

    unpacked: str
    functions: frozenset[str]


def saved_values(
    trainee: Trainee, batch: Any, *, seed: int, device: torch.device, dp_rank: int = 0
) -> SavedValues:
    """Return what hooks of one step of `trainee` give back, and which functions of its own its graph has.

    Args:
        trainee: a fresh model; it takes no optimizer step.
        batch: what it reads, on `device`.
        dp_rank: index of the rank's batch among all data-parallel ones.
    """
    watch = _Watch()
    with seeded(seed, step=0, dp_rank=dp_rank, device=device), watch.active():
        trainee.zero_grad()
        _, loss = trainee.forward(batch)
        functions = frozenset(_own_functions(loss.grad_fn))
        trainee.backward(loss)
    trainee.zero_grad()
    return SavedValues(unpacked=watch.other_values or watch.other_strides, functions=functions)


@dataclass(kw_only=True, slots=True)
class _Watch:
    other_values: str = ""
    other_strides: str = ""
    _kept: list[Any] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch all hooks that are set within the scope."""
        autograd: Any = torch._C._autograd  # type: ignore[attr-defined]  # noqa: SLF001 (no public name)
        push = getattr(autograd, _PUSH)
        setattr(autograd, _PUSH, lambda pack, unpack: push(*self._watched(pack, unpack)))
        try:
            yield
        finally:
            setattr(autograd, _PUSH, push)

    def _watched(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return two hooks that do the same and compare."""

        def packing(tensor: Tensor) -> Any:
            return pack(tensor), _seen(tensor), tensor.stride() if _is_strided(tensor) else ()

        def unpacking(packed: Any) -> Tensor:
            inner, seen, strides = packed
            tensor = unpack(inner)
            if not self.other_values and _seen(tensor) != seen:
                self.other_values = f"other values for a {_named(tensor)}"
            elif not self.other_strides and _is_strided(tensor) and tensor.stride() != strides:
                self.other_strides = f"other strides for a {_named(tensor)}"
            return tensor

        return packing, unpacking


def _seen(tensor: Tensor) -> Any:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not _is_strided(tensor) or tensor.is_meta:
        return None  # of other classes only their own operators know
    return tuple(tensor.shape), tensor.dtype, checksum(tensor)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _named(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _own_functions(root: Node | None) -> Iterator[str]:
    """Yield the names of the nodes of a graph that people's own functions have made."""
    for node in () if root is None else (root, *edges_below(root)):
        if isinstance(node, BackwardCFunction):
            function: Any = getattr(type(node), "_forward_cls", None)
            if function is not None and function.__module__.partition(".")[0] not in _FOREIGN:
                yield function.__qualname__
