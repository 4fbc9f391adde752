"""Two meters for one step, as small as they can be: matmul FLOPs, and storages alive after forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.estimate.host import allocating_on_host

_MATMULS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One step.

    Fields:
        saved_bytes: storages made in forward, in use when it has returned, the output left out.
        host_bytes: of host memory, the same.
        forward_flops, backward_flops: of matmuls.
    """

    saved_bytes: int
    host_bytes: int
    forward_flops: int
    backward_flops: int


class Meter(TorchDispatchMode):
    """Counts matmul FLOPs and follows every storage that an operator makes."""

    def __init__(self, *standing: Tensor) -> None:
        super().__init__()
        self.flops = 0
        self._standing = {t.untyped_storage()._cdata for t in standing}
        self._born: dict[int, tuple[StorageWeakRef, int, bool]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MATMULS:
            left, right = (args[position] for position in _MATMULS[func])
            self.flops += 2 * left.numel() * right.shape[-1]
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._born and storage._cdata not in self._standing:
                self._born[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), allocating_on_host())
        return out

    def alive_bytes(self, *, on_host: bool) -> int:
        """Return the bytes of storages that still have a user."""
        return sum(size for ref, size, host in self._born.values() if host == on_host and not ref.expired())


def measure(model: nn.Module, x: Tensor) -> Measured:
    """Return what one step of `model` on `x` costs; the loss is the sum of the output."""
    forward = Meter(x, *model.parameters(), *model.buffers())
    with forward:
        outputs = model(x)
    output_bytes = outputs.untyped_storage().nbytes()
    saved_bytes = forward.alive_bytes(on_host=False) - output_bytes
    host_bytes = forward.alive_bytes(on_host=True)
    backward = Meter()
    with backward:
        outputs.sum().backward()
    return Measured(
        saved_bytes=saved_bytes,
        host_bytes=host_bytes,
        forward_flops=forward.flops,
        backward_flops=backward.flops,
    )
