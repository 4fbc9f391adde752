"""Tensors that regions move to host memory in one forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from strategies.estimate.liveness import key_of
from strategies.nested.nested_regions import Path
from strategies.regions.host_copies import HostLedger
from strategies.regions.offload_kinds import OffloadKind
from strategies.regions.offloading import KeptStorages
from strategies.regions.saved_tensors import Packed, kept, memory_of, moved


@dataclass(kw_only=True, slots=True)
class _Storages:
    """Storages that the calls of a region that is not recomputed have met.

    Fields:
        inputs: read, and made outside.
    """

    inputs: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)


class Offloads:
    """Tensors of each region that wait on the host: inputs of recomputed ones, saved tensors of the others.

    Args:
        device_type: where tensors come from that are moved.
    """

    def __init__(
        self,
        kinds: Mapping[Path, OffloadKind],
        not_recomputed: Collection[Path],
        ledger: HostLedger,
        device_type: str,
    ) -> None:
        self._kinds = kinds
        self._not_recomputed = not_recomputed
        self._ledger = ledger
        self._device_type = device_type
        self._open: dict[Path, _Storages] = {}
        self._weights: KeptStorages | None = None

    @property
    def is_open(self) -> bool:
        """True if a region that is not recomputed has begun."""
        return bool(self._open)

    def enter(self, path: Path) -> None:
        """Come to a call at `path`."""
        around = [path[:end] for end in range(1, len(path) + 1) if path[:end] in self._not_recomputed]
        self._open = {each: self._open.get(each, _Storages()) for each in around}

    @contextmanager
    def calling(self, module: nn.Module) -> Iterator[None]:
        """Know the weights of `module` for the block: they stay where they are."""
        if not self._open:
            yield
            return
        self._weights = KeptStorages(module, [])
        yield
        self._weights = None

    def read(self, tensor: Tensor) -> None:
        """Take note that a call reads `tensor`."""
        storage = storage_of(tensor) if self._open else 0
        for region in self._open.values():
            if storage not in region.made:
                region.inputs.add(storage)

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Take note that a call has made `tensors`."""
        storages = {storage_of(tensor) for tensor in tensors} if self._open else set()
        for region in self._open.values():
            region.made |= storages - region.inputs

    def moves_inputs_of(self, path: Path) -> bool:
        """Say whether the inputs of a recomputed region wait on the host."""
        return path in self._kinds and path not in self._not_recomputed

    def of_saved(self, tensor: Tensor, path: Path) -> Packed | None:
        """Return what autograd saves in a region that is not recomputed; `None` if it does not choose it."""
        return self._packed(tensor, path) if self._chooses(tensor, path) else None

    def of_input(self, tensor: Tensor, path: Path) -> Packed | None:
        """Return an input of a recomputed region, on the host where it or a region around it says so."""
        if self.moves_inputs_of(path):
            return self._packed(tensor, path)
        for end in range(len(path) - 1, 0, -1):
            around = path[:end]
            if around not in self._not_recomputed:
                return None
            if self._chooses(tensor, around):
                return self._packed(tensor, around)
        return None

    def _chooses(self, tensor: Tensor, path: Path) -> bool:
        kind = self._kinds[path]
        return kind == "all" or (storage_of(tensor) in self._open[path].inputs) == (kind == "inputs")

    def _packed(self, tensor: Tensor, path: Path) -> Packed:
        local = memory_of(tensor)
        if local is None or local.device.type != self._device_type or self._is_weight(tensor, local):
            return kept(tensor)
        return moved(tensor, local, ledger=self._ledger, region=path)

    def _is_weight(self, tensor: Tensor, local: Tensor) -> bool:
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 (no public name)
        return isinstance(whole, nn.Parameter) or (self._weights is not None and local in self._weights)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of the storage of `tensor`; of the tensor itself where it has none."""
    local = memory_of(tensor)
    return id(tensor) if local is None else key_of(local)
