"""The region that offloads: activations wait in host memory between forward and backward.

Autograd calls only the innermost pair of `saved_tensors_hooks`, so what a region does not move, it
gives to the pair around it: that of an enclosing checkpoint, of another region, or a user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_leaves

from strategies.base import Observation, StrategyError
from strategies.estimate.liveness import key_of
from strategies.regions.host_copies import HostLedger
from strategies.regions.offload_kinds import OFFLOAD_KINDS, OffloadKind
from strategies.regions.saved_tensors import (
    Packed,
    hooks_around,
    kept,
    memory_of,
    moved,
    not_compiled,
    packed_by,
    unpacked,
)
from strategies.regions.versions import Version

__all__ = ["HostLedger", "Offloading"]


@dataclass(kw_only=True, slots=True, eq=False)
class Offloading:
    """A region whose saved tensors, or a kind of them, go to host memory.

    Saved: on the device, of what `kind` chooses, weights and buffers; what it does not choose is
        saved as if the region were not there: by the hooks around it, if there are any.
    Recomputed: nothing by this region. Inside a region that recomputes, what is chosen waits in host
        memory *instead of* being recomputed. The enclosing region recomputes for the others, as before,
        and not at all where backward needs none of them.
    Moved: the other storages of what is chosen, once to the host, and back when backward reads them.

    In a forward that runs inside a backward, such as the recomputation of an enclosing region, the same
    tensors are chosen but stay where they are: the enclosing checkpoint sees what it saw in forward,
    and nothing is copied that is read at once or never.

    A tensor that is written in place after it was saved is refused in backward, as it is without hooks.

    Fields:
        ledger: the copies of all regions of one model, so that a storage saved in two is moved once.
        kind: `all` chooses every saved tensor; `inputs` those whose storage is that of a tensor among
            the arguments, be it a view; `internals` all but these.
        least_bytes: size of the smallest storages that are chosen.

    Raises:
        StrategyError: `kind` is invalid.
    """

    ledger: HostLedger
    kind: OffloadKind = "all"
    least_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in OFFLOAD_KINDS:
            raise StrategyError("offload", f"must be one of {', '.join(OFFLOAD_KINDS)}, got {self.kind!r}")

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, with what autograd saves of it packed into host copies."""
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        pack, hook = not_compiled(self._begin)(module, args, kwargs)
        with saved_tensors_hooks(hook, unpacked):
            try:
                return body(*args, **kwargs)
            finally:
                not_compiled(_settle)(pack)
                pack.enclosing = None  # the graph keeps `pack`, which must not keep what stands around

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Pack, Callable[[Tensor], Packed]]:
        """Return what packs the tensors of a call, and the hook that autograd calls between graphs too."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        pack = _Pack(self, module, inputs)
        if not pack.is_in_backward:
            self.ledger.begin_forward()
        return pack, not_compiled(pack.__call__)

    @property
    def moved_bytes(self) -> int:
        """Bytes of the storages that this region was the first to move in the latest step.

        The sum over the regions of a ledger is its `offloaded_bytes`.
        """
        return self.ledger.traffic_of(self).moved_bytes

    @property
    def fetched_bytes(self) -> int:
        """Bytes of these storages brought back in the latest step, each time anew."""
        return self.ledger.traffic_of(self).fetched_bytes

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, over all regions of the ledger."""
        return Observation(offloaded_bytes=self.ledger.offloaded_bytes)


class _Pack:
    """The hook that autograd calls with every tensor that it saves in one call of a region.

    A recomputation must choose as forward did, and it sees other objects in the same places. So a
    tensor is chosen by its storage and by nothing else: what the module owns, which a first forward
    may add to, tells only where a chosen tensor waits.

    Attributes:
        is_in_backward: this call of the region is part of a backward.
        enclosing: the hooks around the region, which autograd does not call inside.
    """

    def __init__(self, region: Offloading, module: nn.Module, inputs: list[Tensor]) -> None:
        # torch's checkpoint asks the first in the same way; nothing public tells either
        self.is_in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        self.enclosing = hooks_around()
        self._region = region
        self._operator = -1
        self._fresh: list[_Fresh] = []
        self._kept = KeptStorages(module, inputs)
        self._inputs = {_identity(tensor) for tensor in inputs} if region.kind != "all" else set()
        owned = chain(inputs, module.parameters(), module.buffers())
        # where there is an accelerator, tensors of the CPU are on the host already
        self._device_type = next((t.device.type for t in owned if t.device.type != "cpu"), "cpu")

    def __call__(self, saved: Tensor) -> Packed:
        """Move a saved tensor to the host if it is chosen; return what gives it back."""
        local = memory_of(saved)
        if local is None or not self._is_chosen(local):
            return packed_by(self.enclosing, saved)
        if self.is_in_backward or local.device.type != self._device_type or local in self._kept:
            return kept(saved)
        operator = torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001 (no public way)
        if operator != self._operator:
            self.settle()
            self._operator = operator
        move = partial(moved, saved, local, ledger=self._region.ledger, region=self._region)
        if saved.requires_grad or local._version or not saved.is_floating_point():  # noqa: SLF001 (as autograd checks it)
            return move()
        self._fresh.append(_Fresh(saved, move))
        return self._fresh[-1]

    def settle(self) -> None:
        """Move what the operator before has saved: it has run by now."""
        for each in self._fresh:
            each.settle()
        self._fresh.clear()

    def _is_chosen(self, local: Tensor) -> bool:
        if local.untyped_storage().nbytes() < self._region.least_bytes:
            return False
        if self._region.kind == "all":
            return True
        return (key_of(local) in self._inputs) == (self._region.kind == "inputs")


class _Fresh:
    """A tensor that an operator may be about to fill, as RReLU fills the noise that autograd saves before.

    It is moved once the operator has run, which is known when the next one saves something; unless it was
    written since, which is refused in backward.
    """

    __slots__ = ("_move", "_packed", "_version")

    def __init__(self, saved: Tensor, move: Callable[[], Packed]) -> None:
        self._packed, self._move = kept(saved), move
        self._version = Version(counter=saved, expected=saved._version)  # noqa: SLF001 (as autograd checks it)

    def settle(self) -> None:
        """Move it."""
        if not self._version.is_past():
            self._packed = self._move()
        del self._move, self._version

    def __call__(self) -> Tensor:
        return self._packed()


def _settle(pack: _Pack) -> None:
    pack.settle()


class KeptStorages:
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
        if self._gathers:
            self._identities = self._given | self._owned()
        return key_of(local) in self._identities

    def _owned(self) -> set[int | None]:
        """Return the storages that modules own, which are never offloaded."""
        return {
            _identity(tensor)
            for owner in self._owners
            # FSDP1 without original parameters puts views of its flat parameter among plain attributes
            for tensors in (owner._parameters, owner._buffers, vars(owner))  # noqa: SLF001 (not recursive)
            for tensor in tensors.values()
            if isinstance(tensor, Tensor)
        }


def _identity(tensor: Tensor) -> int | None:
    local = memory_of(tensor)
    return key_of(local) if local is not None else None
