"""The object that the autograd graph holds for a saved tensor: it, a host copy's view, or a ticket.

A ticket stands for a tensor that is made again, and is redeemed once. There are two, with nothing to share:

* That of a nested region (`nested.tickets`) waits until calls of modules run again and save the tensor once
  more. It cannot ask for one tensor: hooks of modules, FSDP's too, and state belong to whole calls.
* That of a plan (`budget.eager.slice_ticket`) asks for the operators that make its storage; no others run.

What runs again reads its inputs in two ways for the same reason: calls read whole tensors from outside of the
region, cut off from their graph (`nested.inputs`); operators read places in storages, whose readers Python
counts, so that a storage is freed with the last of them (`budget.eager.contents`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
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

Hooks: TypeAlias = "tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]"
"""What packs a tensor that autograd saves, and what unpacks it."""


def hooks_around() -> Hooks | None:
    """Return the hooks that stand here, of which autograd calls only the innermost pair; `None` for none."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001 (no public way)
    return hooks


def unpacked(packed: Packed) -> Tensor:
    """Return what was packed: the unpack hook of all that pack so."""
    return packed()


def packing(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor] = unpacked) -> saved_tensors_hooks:
    """Return a scope in which `pack` takes what autograd saves, between graphs of compiled modules too."""
    return saved_tensors_hooks(not_compiled(pack), unpack)


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what torch.compile calls as it is: no graph of its own begins there."""
    dynamo = sys.modules.get("torch._dynamo")  # nobody compiles who has not imported it
    return function if dynamo is None else dynamo.disable(function)


@contextmanager
def without_hooks() -> Iterator[None]:
    """Have autograd save tensors as they are within the scope, whatever hooks stand around it."""
    taken: list[Hooks] = []
    while (hooks := hooks_around()) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001 (no public way)
        taken.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)  # noqa: SLF001 (as above)


def packed_by(hooks: Hooks | None, saved: Tensor) -> Packed:
    """Return what hooks make of a saved tensor that is none of a region's; without hooks it stays."""
    if hooks is None:
        return kept(saved)
    pack, unpack = hooks
    return partial(unpack, pack(saved))


def kept(saved: Tensor) -> Packed:
    """Return `saved` itself, where it is."""
    # the result of an operator refers to the node that saves it: kept as it is, neither is ever freed
    tensor = saved if saved.grad_fn is None else without_graph(saved)
    return partial(_checked, tensor, saved._version)  # noqa: SLF001 (as autograd checks it)


def _checked(tensor: Tensor, expected: int) -> Tensor:
    if tensor._version != expected:  # noqa: SLF001 (as above)
        Version(tensor, expected).refuse_past(tensor)
    return tensor


@torch.no_grad()
def moved(saved: Tensor, local: Tensor, *, ledger: HostLedger, region: Hashable) -> Packed:
    """Return `saved` as a view of a host copy, which is made now unless it exists.

    Args:
        saved: the tensor; a `DTensor` is placed again as it was, and a jagged one gets its offsets.
        local: the dense tensor on this rank with its memory, as `memory_of` finds it.
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


def without_graph(tensor: Tensor) -> Tensor:
    """Return another tensor on the memory of `tensor`, with its counter, its type and its attributes."""
    alias = alias_of_plain(tensor) if type(tensor) in PLAIN else tensor.detach()
    return likened(alias, type(tensor), attributes_of(tensor))


def attributes_of(tensor: Tensor) -> Mapping[str, Any]:
    """Return what Python has set on a tensor; nothing where a compiler records this code."""
    return {} if torch.compiler.is_compiling() else vars(tensor)


def likened(tensor: Tensor, cls: type[Tensor], attributes: Mapping[str, Any]) -> Tensor:
    """Return `tensor` as the tensor that it stands for was: with its type and its attributes.

    Python may have set attributes on any tensor, and neither copies nor detached tensors have them.

    Args:
        cls: type of what was saved; one with `__torch_dispatch__` makes its copies itself.
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
    if type(tensor) in PLAIN and not (tensor.is_nested or tensor.is_meta):
        return tensor if tensor.layout is torch.strided else None
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
