"""What the autograd graph holds for a saved tensor: the tensor, a view of a host copy, or a handle."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strategies.regions.host_copies import HostCopy, HostLedger
from strategies.regions.versions import Version, version_of


class Packed(Protocol):
    """What the pack hook returns and the unpack hook is given."""

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved.

        Raises:
            RuntimeError: it was written in place since.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A saved tensor that other hooks have packed.

    Fields:
        handle: what their pack hook returned.
        unpack_handle: their unpack hook.
    """

    handle: Any
    unpack_handle: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        """Return what the other hooks make of it."""
        return self.unpack_handle(self.handle)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A saved tensor itself, where it is."""

    tensor: Tensor
    version: Version

    @classmethod
    def make(cls, saved: Tensor) -> Kept:
        """Return `saved`, kept."""
        # the result of an operator refers to the node that saves it: kept as it is, neither is ever freed
        tensor = saved.detach() if saved.grad_fn is not None else saved
        return cls(tensor=tensor, version=Version(counter=tensor, expected=saved._version))  # noqa: SLF001

    def unpack(self) -> Tensor:
        """Return the tensor, refused if it was written since."""
        self.version.refuse_past(self.tensor)
        return self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A saved tensor as a view of a host copy.

    Fields:
        ledger: the ledger of the copy.
        copy: the storage.
        dtype, size, stride, offset: the view, in elements.
        version: of the tensor when it was saved.
        distributed: the placement, if it was a DTensor.
    """

    ledger: HostLedger
    copy: HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    version: Version
    distributed: _Distribution | None

    @classmethod
    @torch.no_grad()
    def make(cls, saved: Tensor, local: Tensor, *, ledger: HostLedger, region: Hashable) -> Moved:
        """Return `saved`, moved to the host for `region`; `local` is its dense tensor on this rank."""
        version = version_of(saved if isinstance(saved, DTensor) else local)
        # a lazy conjugate or negative is a flag on a view that the host copy would not carry
        local = local.resolve_conj().resolve_neg()
        return cls(
            ledger=ledger,
            copy=ledger.copy_of(local, version, region),
            dtype=local.dtype,
            size=local.size(),
            stride=local.stride(),
            offset=local.storage_offset(),
            version=version,
            distributed=_Distribution.of(saved) if isinstance(saved, DTensor) else None,
        )

    @torch.no_grad()
    def unpack(self) -> Tensor:
        """Return the tensor from its host copy, refused if it was written since."""
        flat = self.ledger.restored(self.copy)
        local = flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)
        self.version.refuse_past(local)
        return self.distributed.again(local) if self.distributed is not None else local


@dataclass(frozen=True, kw_only=True, slots=True)
class _Distribution:
    """What makes a DTensor of a local tensor again."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, saved: DTensor) -> _Distribution:
        """Return the distribution of `saved`."""
        return cls(
            mesh=saved.device_mesh, placements=saved.placements, shape=saved.shape, stride=saved.stride()
        )

    def again(self, local: Tensor) -> Tensor:
        """Return the DTensor whose part on this rank is `local`."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def local_of(tensor: Tensor) -> Tensor | None:
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
