"""What the autograd graph holds for a saved tensor: the tensor, a view of a host copy, or a handle."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from strategies.regions.host_copies import HostLedger
from strategies.regions.versions import PLAIN, Version, alias_of_plain, version_of

Packed: TypeAlias = Callable[[], Tensor]
"""What the pack hook returns and the unpack hook calls, for the tensor as it was saved.

`RuntimeError` where it was written in place since.
"""


def kept(saved: Tensor) -> Packed:
    """Return `saved` itself, where it is."""
    # the result of an operator refers to the node that saves it: kept as it is, neither is ever freed
    tensor = saved
    if saved.grad_fn is not None:
        tensor = alias_of_plain(saved) if type(saved) in PLAIN else saved.detach()
    version = Version(counter=tensor, expected=saved._version)  # noqa: SLF001 (as autograd checks it)

    def unpack() -> Tensor:
        version.refuse_past(tensor)
        return tensor

    return unpack


@torch.no_grad()
def moved(saved: Tensor, local: Tensor, *, ledger: HostLedger, region: Hashable) -> Packed:
    """Return `saved` as a view of a host copy, which is made now unless it exists.

    Args:
        saved: the tensor; a `DTensor` is placed again as it was.
        local: its dense tensor on this rank.
        ledger: the ledger of the copy.
        region: who asks, and answers for the bytes of a new copy.
    """
    version = version_of(saved if isinstance(saved, DTensor) else local)
    # a lazy conjugate or negative is a flag on a view that the host copy would not carry
    local = local.resolve_conj().resolve_neg()
    copy = ledger.copy_of(local, version, region)
    dtype, view = local.dtype, (local.size(), local.stride(), local.storage_offset())
    placed = placed_as(saved) if isinstance(saved, DTensor) else None

    @torch.no_grad()
    def unpack() -> Tensor:  # holds the memory of neither argument
        tensor = ledger.restored(copy).view(dtype).as_strided(*view)
        version.refuse_past(tensor)
        return tensor if placed is None else placed(tensor)

    return unpack


def placed_as(saved: DTensor) -> Callable[[Tensor], DTensor]:
    """Return what makes a DTensor like `saved` of a local tensor."""
    return partial(
        DTensor.from_local,
        device_mesh=saved.device_mesh,
        placements=saved.placements,
        run_check=False,
        shape=saved.shape,
        stride=saved.stride(),
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
