"""The layout of a tensor in its storage, so that it can be made again of the storage alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strategies.regions.saved_tensors import placed_as

_PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})
_made = tuple.__new__  # a third of the time of a named tuple's own


class MemoryLayout(NamedTuple):
    """A tensor without its storage.

    Fields:
        dtype, size, stride, offset: place of the dense tensor on this rank.
        is_conj, is_neg: whether it is read conjugated or negated.
        place: makes the DTensor of it, where it was one.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    place: Callable[[Tensor], Tensor] | None

    @classmethod
    def of(cls, tensor: Tensor, dense: Tensor) -> MemoryLayout:
        """Return the layout of `tensor`, whose memory on this rank is `dense`."""
        place = placed_as(tensor) if tensor is not dense and isinstance(tensor, DTensor) else None
        known = dense.dtype, dense.size(), dense.stride(), dense.storage_offset()
        return _made(cls, (*known, dense.is_conj(), dense.is_neg(), place))

    @property
    def is_plain(self) -> bool:
        """True if the tensor is its memory, without a placement and read as it is."""
        return self.place is None and not self.is_conj and not self.is_neg

    def on(self, memory: Tensor) -> Tensor:
        """Return the tensor on the storage of `memory`, a dense tensor."""
        dtype, size, stride, offset, is_conj, is_neg, place = self
        tensor = memory
        if memory.dtype != dtype or is_conj or is_neg or memory.is_conj() or memory.is_neg():
            whole = torch.empty(0, dtype=dtype, device=memory.device)
            tensor = whole.set_(memory.untyped_storage(), offset, size, stride)
            tensor = tensor.conj() if is_conj else tensor
            tensor = tensor._neg_view() if is_neg else tensor  # noqa: SLF001 (no public name)
        elif memory.size() != size or memory.storage_offset() != offset or memory.stride() != stride:
            tensor = memory.as_strided(size, stride, offset)
        return tensor if place is None else place(tensor)


def dense_of(tensor: Tensor) -> Tensor | None:
    """Return the dense tensor of this rank behind `tensor`, `None` where there is none with a storage.

    The result of a collective may not be there yet; `local_of` waits for it.
    """
    if type(tensor) in _PLAIN:
        return tensor if tensor.layout is torch.strided else None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 (to_local makes a view)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.elem
    if local.layout is not torch.strided or is_traceable_wrapper_subclass(local):
        return None
    return local


def copied(memory: Tensor) -> Tensor:
    """Return a copy of the whole storage of `memory`, on which the same layouts lie."""
    elements = memory.untyped_storage().nbytes() // memory.element_size()
    return memory.as_strided((elements,), (1,), 0).clone()
