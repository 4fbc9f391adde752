"""The region that offloads: activations wait in host memory between forward and backward.

Every storage that autograd saves is copied once, however many tensors view it; weights and buffers
stay. On CUDA the copies run on a stream of their own into pinned memory, and backward fetches ahead.
On CPU the same code copies to ordinary memory, marked by `strategies.host`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from strategies.base import Observation
from strategies.host import host_allocation

FETCH_AHEAD = 2
"""Storages that backward fetches before they are asked for."""


@dataclass(kw_only=True, slots=True)
class Offloading:
    """A region whose saved activations go to host memory.

    Fields:
        ledger: the copies of all regions of one model, so that a storage saved in two is moved once.
    """

    ledger: HostLedger

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, with what autograd saves of it packed into host copies."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or not inputs:
            return body(*args, **kwargs)
        self.ledger.begin_forward()
        kept = _KeptStorages(module, inputs)
        device_type = inputs[0].device.type

        def pack(saved: Tensor) -> _Packed | Tensor:
            local = _local(saved)
            if local is None or local.device.type != device_type or local in kept:
                return saved
            return _pack(saved, local, self.ledger)

        def unpack(packed: _Packed | Tensor) -> Tensor:
            return _unpack(packed, self.ledger) if isinstance(packed, _Packed) else packed

        with saved_tensors_hooks(pack, unpack):
            return body(*args, **kwargs)

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, over all regions of the ledger."""
        return Observation(offloaded_bytes=self.ledger.offloaded_bytes)


class HostLedger:
    """The host copies of one model, in the order in which forward made them.

    Copies belong to the autograd graph, which frees them as backward passes; the ledger only finds
    them. A deep copy of a ledger is an empty one.

    Attributes:
        offloaded_bytes: bytes copied to the host since the first forward after a backward.
    """

    def __init__(self) -> None:
        self.offloaded_bytes = 0
        self._copies: weakref.WeakValueDictionary[int, _HostCopy] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[_HostCopy] | None = None
        self._in_use: weakref.WeakSet[_HostCopy] = weakref.WeakSet()
        self._node: int | None = None
        self._backward_ran = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[HostLedger], tuple[()]]:
        return HostLedger, ()

    def begin_forward(self) -> None:
        """Start counting anew where a backward has run since the last forward."""
        if self._backward_ran:
            self.offloaded_bytes = 0
            self._backward_ran = False

    def copy_of(self, local: Tensor) -> _HostCopy:
        """Return the host copy of the storage of `local`, made now unless it exists."""
        storage = local.untyped_storage()
        copy = self._copies.get(storage._cdata)  # noqa: SLF001 (the identity that storages have)
        if copy is not None and copy.version == local._version:  # noqa: SLF001 (as autograd checks it)
            return copy
        copy = _HostCopy(local, previous=self._latest, stream=self._stream(local.device))
        self._copies[storage._cdata] = copy  # noqa: SLF001
        self._latest = weakref.ref(copy)
        self.offloaded_bytes += copy.nbytes
        return copy

    def restored(self, copy: _HostCopy) -> Tensor:
        """Return the storage of `copy` on its device, flat, shared by all that one backward node unpacks."""
        self._backward_ran = True
        node = id(torch._C._current_autograd_node())  # noqa: SLF001 (no public way to know the running node)
        if node != self._node:
            for other in self._in_use:
                other.drop()
            self._in_use.clear()
            self._node = node
        self._in_use.add(copy)
        flat = copy.fetched(self._stream(copy.device))
        self._fetch_ahead(copy)
        return flat

    def _fetch_ahead(self, copy: _HostCopy) -> None:
        following = copy.earlier()
        for _ in range(FETCH_AHEAD):
            if following is None:
                return
            following.fetch(self._stream(following.device))
            following = following.earlier()

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _HostCopy:
    """One storage in host memory.

    Attributes:
        nbytes: size of the storage.
        version: autograd's version of the storage when it was copied.
        device: where it came from.
    """

    def __init__(
        self, local: Tensor, *, previous: weakref.ref[_HostCopy] | None, stream: torch.cuda.Stream | None
    ) -> None:
        storage = local.untyped_storage()
        self.nbytes = storage.nbytes()
        self.version = local._version  # noqa: SLF001 (as autograd checks it)
        self.device = local.device
        # holds the identity of the storage, not its memory: the address is not reused while this lives
        self._source = StorageWeakRef(storage)
        self._previous = previous
        self._flat: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        elements = self.nbytes // local.element_size()
        with host_allocation():
            self._host = torch.empty(elements, dtype=local.dtype, device="cpu", pin_memory=stream is not None)
        source = local.as_strided((elements,), (1,), 0)
        if stream is None:
            self._host.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def earlier(self) -> _HostCopy | None:
        """Return the copy that forward made before this one, which backward wants after it."""
        return self._previous() if self._previous is not None else None

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Start bringing the storage back, unless it is on the device."""
        if self._flat is not None:
            return
        if stream is None:
            self._flat = torch.empty_like(self._host, device=self.device).copy_(self._host)
            return
        with torch.cuda.stream(stream):
            self._flat = torch.empty_like(self._host, device=self.device, pin_memory=False)
            self._flat.copy_(self._host, non_blocking=True)
            self._ready = stream.record_event()

    def fetched(self, stream: torch.cuda.Stream | None) -> Tensor:
        """Return the storage on its device, flat; the current stream waits for it."""
        self.fetch(stream)
        assert self._flat is not None
        if self._ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready)
            self._flat.record_stream(current)
            self._ready = None
        return self._flat

    def drop(self) -> None:
        """Let go of the device's copy; tensors that view it keep it."""
        self._flat = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """A saved tensor as a view of a host copy; `like` is the DTensor's placement, if it was one."""

    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    distributed: _Distribution | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Distribution:
    """What makes a DTensor of a local tensor again."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class _KeptStorages:
    """Storages that stay on the device: weights, buffers, and tensors kept as attributes.

    Where FSDP gathers inside the region, the weights are other storages once forward runs, so they
    are looked up whenever autograd saves something; elsewhere once.
    """

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self._owners = list(module.modules())
        self._gathers = any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in self._owners)
        self._given = {_identity(tensor) for tensor in inputs if isinstance(tensor, nn.Parameter)}
        self._identities = self._given | self._owned()

    def __contains__(self, local: Tensor) -> bool:
        identity = local.untyped_storage()._cdata  # noqa: SLF001 (the identity that storages have)
        if self._gathers:
            self._identities = self._given | self._owned()
        return identity in self._identities

    def _owned(self) -> set[int | None]:
        return {
            _identity(tensor)
            for owner in self._owners
            # FSDP1 without original parameters puts views of its flat parameter among plain attributes
            for tensors in (owner._parameters, owner._buffers, vars(owner))  # noqa: SLF001 (not recursive)
            for tensor in tensors.values()
            if isinstance(tensor, Tensor)
        }


def _identity(tensor: Tensor) -> int | None:
    local = _local(tensor)
    return local.untyped_storage()._cdata if local is not None else None  # noqa: SLF001


def _local(tensor: Tensor) -> Tensor | None:
    """Return the dense tensor of this rank behind `tensor`, `None` where there is none to move."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 (to_local makes a view)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if (
        local.layout is not torch.strided
        or is_traceable_wrapper_subclass(local)
        or local.device.type == "meta"
    ):
        return None
    return local


@torch.no_grad()
def _pack(saved: Tensor, local: Tensor, ledger: HostLedger) -> _Packed:
    # a lazy conjugate or negative is a flag on a view that the host copy would not carry
    local = local.resolve_conj().resolve_neg()
    distributed = None
    if isinstance(saved, DTensor):
        distributed = _Distribution(
            mesh=saved.device_mesh, placements=saved.placements, shape=saved.shape, stride=saved.stride()
        )
    return _Packed(
        copy=ledger.copy_of(local),
        dtype=local.dtype,
        size=local.size(),
        stride=local.stride(),
        offset=local.storage_offset(),
        distributed=distributed,
    )


@torch.no_grad()
def _unpack(packed: _Packed, ledger: HostLedger) -> Tensor:
    flat = ledger.restored(packed.copy)
    local = flat.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
    if packed.distributed is None:
        return local
    return DTensor.from_local(
        local,
        packed.distributed.mesh,
        packed.distributed.placements,
        run_check=False,
        shape=packed.distributed.shape,
        stride=packed.distributed.stride,
    )
