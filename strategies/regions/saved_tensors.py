"""What the autograd graph holds for a saved tensor: the tensor, a view of a host copy, or a handle."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
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
        tensor = likened(tensor, type(saved), attributes_of(saved))
    version = Version(counter=tensor, expected=saved._version)  # noqa: SLF001 (as autograd checks it)

    def unpack() -> Tensor:
        version.refuse_past(tensor)
        return tensor

    return unpack


@torch.no_grad()
def moved(saved: Tensor, local: Tensor, *, ledger: HostLedger, region: Hashable) -> Packed:
    """Return `saved` as a view of a host copy, which is made now unless it exists.

    Args:
        saved: the tensor; a `DTensor` is placed again as it was, and a jagged one gets its offsets.
        local: the dense tensor on this rank with its memory, as `memory_of` finds it.
        ledger: the ledger of the copy.
        region: who asks, and answers for the bytes of a new copy.
    """
    version = version_of(local if type(local) is type(saved) else saved)
    # a lazy conjugate or negative is a flag on a view that the host copy would not carry
    local = local.resolve_conj().resolve_neg()
    copy = ledger.copy_of(local, version, region)
    dtype, view = local.dtype, (local.size(), local.stride(), local.storage_offset())
    placed, attributes = _placed_as(saved), attributes_of(saved)
    cls = Tensor if is_traceable_wrapper_subclass(saved) else type(saved)

    @torch.no_grad()
    def unpack() -> Tensor:  # holds the memory of neither argument
        tensor = ledger.restored(copy).view(dtype).as_strided(*view)
        version.refuse_past(tensor)
        return likened(tensor if placed is None else placed(tensor), cls, attributes)

    return unpack


def attributes_of(tensor: Tensor) -> Mapping[str, Any]:
    """Return what Python has set on a tensor; nothing where a compiler records this code."""
    return {} if torch.compiler.is_compiling() else vars(tensor)


def likened(tensor: Tensor, cls: type[Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """Return `tensor` as the tensor that it stands for was: with its type and its attributes.

    Python may have set attributes on any tensor, and neither copies nor detached tensors have them.

    Args:
        tensor: what comes back.
        cls: type of what was saved; one with `__torch_dispatch__` makes its copies itself.
        attributes: its attributes.
    """
    if type(tensor) is Tensor and cls not in PLAIN:
        tensor = tensor.as_subclass(cls)
    if attributes:
        own = vars(tensor)
        own.update((name, value) for name, value in attributes.items() if name not in own)
    return tensor


def memory_of(tensor: Tensor) -> Tensor | None:
    """Return the dense tensor of this rank with the memory of `tensor`, `None` where there is none to move.

    Of a jagged tensor these are its values; offsets stay, as shapes are known by them.
    """
    return tensor._values if isinstance(tensor, NestedTensor) else local_of(tensor)  # noqa: SLF001 (values() makes a view)


def _placed_as(saved: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return what makes a tensor like `saved` of one that has its memory; `None` for a dense one."""
    if isinstance(saved, DTensor):
        return placed_as(saved)
    return _jagged_as(saved) if isinstance(saved, NestedTensor) else None


def _jagged_as(saved: NestedTensor) -> Callable[[Tensor], Tensor]:
    names, context = saved.__tensor_flatten__()
    others = {name: getattr(saved, name) for name in names if name != "_values"}
    context = {**context, "requires_grad": False}
    size, stride = saved.size(), saved.stride()

    def place(values: Tensor) -> Tensor:
        jagged: Tensor = NestedTensor.__tensor_unflatten__(
            {**others, "_values": values}, context, size, stride
        )
        return jagged

    return place


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
        or local.is_nested
        or is_traceable_wrapper_subclass(local)
        or local.device.type == "meta"
    ):
        return None
    return local
