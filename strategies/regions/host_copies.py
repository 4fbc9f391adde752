"""Copies of activations in host memory: made in forward, brought back in backward, counted both ways.

Every storage is copied once, however many tensors view it. On CUDA the copies run on a stream of
their own into pinned memory, and backward fetches ahead. On CPU the same code copies to ordinary
memory, marked by `strategies.estimate.host`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from strategies.estimate.host import host_allocation
from strategies.regions.versions import PLAIN, Version

FETCH_AHEAD = 2
"""Storages that backward fetches before they are asked for, where nobody chooses."""


@dataclass(kw_only=True, slots=True)
class Traffic:
    """The bytes that one region moved in the latest step.

    Fields:
        moved_bytes: bytes of storages that the region was the first to copy to the host.
        fetched_bytes: bytes of these, brought back; a storage that two distant nodes of backward read is
            brought back twice.
    """

    moved_bytes: int = 0
    fetched_bytes: int = 0


class HostLedger:
    """The host copies of one model, in the order in which forward made them.

    Copies belong to the autograd graph, which frees them as backward passes; the ledger only finds
    them. A deep copy of a ledger is an empty one. A step lasts from the first forward after a
    backward until the next such forward.

    Args:
        fetch_ahead: storages that backward begins to fetch before they are asked for.
    """

    def __init__(self, fetch_ahead: int = FETCH_AHEAD) -> None:
        self._fetches_ahead = fetch_ahead
        self._traffic: dict[Hashable, Traffic] = {}
        self._copies: weakref.WeakValueDictionary[int, HostCopy] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[HostCopy] | None = None
        # in order: a set would free them in another order in each process
        self._in_use: weakref.WeakKeyDictionary[HostCopy, None] = weakref.WeakKeyDictionary()
        self._node: int | None = None
        self._backward_ran = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[HostLedger], tuple[int]]:
        return HostLedger, (self._fetches_ahead,)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in the latest step: the sum over regions."""
        return sum(traffic.moved_bytes for traffic in self._traffic.values())

    def traffic_of(self, region: Hashable) -> Traffic:
        """Return what `region` moved in the latest step."""
        return self._traffic.get(region, Traffic())

    def begin_forward(self) -> None:
        """Start counting anew where a backward has run since the last forward."""
        if self._backward_ran:
            self._traffic = {}
            self._backward_ran = False

    def copy_of(self, local: Tensor, version: Version, region: Hashable) -> HostCopy:
        """Return the host copy of the storage of `local`, made now unless it exists.

        Args:
            local: a dense tensor, no lazy view.
            version: its version. A copy serves no more that was made for one that is past; nor, since a
                storage may be written without that, one that the storage has ceased to equal, where comparing
                does not wait; nor one made under a counter of writes that is not that of `version`.
            region: who asks, and answers for the bytes of a new copy.
        """
        storage = local.untyped_storage()
        copy = self._copies.get(storage._cdata)  # noqa: SLF001 (the identity that storages have)
        if copy is not None and copy.serves(local, version):
            return copy
        traffic = self._traffic.setdefault(region, Traffic())
        stream = self._stream(local.device)
        copy = HostCopy(local, version, previous=self._latest, stream=stream, traffic=traffic)
        self._copies[storage._cdata] = copy  # noqa: SLF001
        self._latest = weakref.ref(copy)
        traffic.moved_bytes += copy.nbytes
        return copy

    def restored(self, copy: HostCopy) -> Tensor:
        """Return the storage of `copy` on its device, flat, shared by all that one backward node unpacks."""
        self._backward_ran = True
        running = torch._C._current_autograd_node()  # noqa: SLF001 (no public way to know the running node)
        node = None if running is None else running._sequence_nr()  # noqa: SLF001 (its id may be another's)
        if node != self._node:
            for other in self._in_use:
                other.drop()
            self._in_use.clear()
            self._node = node
        self._in_use[copy] = None
        flat = copy.fetched(self._stream(copy.device))
        self._fetch_ahead(copy)
        return flat

    def taken(self, copy: HostCopy) -> Tensor:
        """Return the storage of `copy` on its device, flat, for the caller alone; fetch nothing ahead."""
        self._backward_ran = True
        flat = copy.fetched(self._stream(copy.device))
        copy.drop()
        return flat

    def _fetch_ahead(self, copy: HostCopy) -> None:
        """Begin to fetch what backward asks for after `copy`."""
        following = copy.earlier()
        for _ in range(self._fetches_ahead):
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


class HostCopy:
    """One storage in host memory. `version`: version of the tensor that it was made for."""

    def __init__(
        self,
        local: Tensor,
        version: Version,
        *,
        previous: weakref.ref[HostCopy] | None,
        stream: torch.cuda.Stream | None,
        traffic: Traffic,
    ) -> None:
        storage = local.untyped_storage()
        self.nbytes = storage.nbytes()
        self.version = version
        self.device = local.device
        # holds the identity of the storage, not its memory: the address is not reused while this lives
        self._source = StorageWeakRef(storage)
        self._previous = previous
        self._traffic = traffic
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

    def serves(self, local: Tensor, version: Version) -> bool:
        """Return whether `local`, of `version` and on the storage that was copied, is what the copy holds."""
        if not self.version.serves(version):
            return False
        if local.device.type != "cpu" or type(local) not in PLAIN:
            return True  # to compare would be to wait; a fake tensor has no values
        now, then = local.untyped_storage(), self._host.untyped_storage()
        return bool(_memory().memcmp(now.data_ptr(), then.data_ptr(), then.nbytes()) == 0)

    def earlier(self) -> HostCopy | None:
        """Return the copy that forward made before this one, which backward wants after it."""
        return self._previous() if self._previous is not None else None

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Start bringing the storage back, unless it is on the device."""
        if self._flat is not None:
            return
        self._traffic.fetched_bytes += self.nbytes
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


@cache
def _memory() -> ctypes.CDLL:
    """Return the library that compares memory, faster than tensors are compared, and unseen by modes."""
    library = ctypes.CDLL(None)
    library.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return library
