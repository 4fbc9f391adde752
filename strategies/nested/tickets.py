"""Tickets: what the autograd graph holds for a tensor that it saves in a region."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from strategies.nested.nest_options import Regions
from strategies.nested.nested_regions import path_name
from strategies.regions.saved_tensors import Packed
from strategies.regions.split_backward import runs_again
from strategies.regions.spoilt_values import Spoilt
from strategies.regions.versions import Version


class Recomputed(Protocol):
    """A region that can run again."""

    def recompute(self, regions: Regions) -> None:
        """Fill the tickets that lie directly in `regions`, it or one inside."""


class Ticket:
    """Redeemed for the tensor, which a recomputation of its region fills in: once in each backward.

    Tickets are held weakly by others, so a region that nobody needs is not recomputed, and all dies with the
    graph.

    Args:
        holds: keep what is filled in where its node of autograd runs again in the weight part of a backward.

    Attributes:
        packed: what returns the tensor, while no region recomputes it.
        region: outermost region in which it is recomputed; `None` for a tensor that `packed` returns.
    """

    __slots__ = ("__weakref__", "_filled", "_holds", "_kind", "_version", "packed", "region", "regions")

    def __init__(self, saved: Tensor, *, holds: bool) -> None:
        self._holds = holds
        self.packed: Packed | None = None
        self.region: Recomputed | None = None
        self.regions: Regions = ()
        self._filled: Version | None = None
        self._kind = saved.shape, saved.dtype
        self._version = saved._version if _is_parameter(saved) else None  # noqa: SLF001 (as autograd checks it)

    def belong(self, region: Recomputed, regions: Regions) -> None:
        """Let the tensor go; it is recomputed in `regions`."""
        self.region, self.regions, self.packed = region, regions, None

    def lacks(self) -> bool:
        """Say whether it waits for a recomputation."""
        return self.region is not None and self._filled is None

    def fill(self, tensor: Tensor, name: str) -> None:
        """Take what the recomputation has saved in the place of the tensor: `tensor`, without its graph.

        Raises:
            CheckpointError: it is of another shape or dtype.
            RuntimeError: it is a parameter that was changed since.
        """
        if self._kind != (tensor.shape, tensor.dtype):
            then, now = (
                f"{str(dtype).removeprefix('torch.')} {list(shape)}"
                for shape, dtype in (self._kind, (tensor.shape, tensor.dtype))
            )
            raise CheckpointError(f"ac: {name!r} saved {then} in forward and {now} in its recomputation")
        current = tensor._version  # noqa: SLF001 (as autograd checks it)
        is_past = self._version is not None and not isinstance(tensor, Spoilt) and current != self._version
        if is_past:  # under FSDP, where nobody else asks
            problem = f"a parameter of {list(self._kind[0])} was changed in place after {name!r} had used it"
            raise RuntimeError(f"ac: {problem}, and before its backward; update it after backward")
        self._filled = Version(counter=tensor, expected=current)

    def redeem(self) -> Tensor:
        """Return the saved tensor. Raises CheckpointError: the recomputation did not save it."""
        if self.packed is not None:
            return self.packed()
        if self._filled is None:
            assert self.region is not None
            self.region.recompute(self.regions)
        filled = self._filled
        if not (self._holds and runs_again()):
            self._filled = None
        if filled is None:
            name = path_name(self.regions[-1])
            raise CheckpointError(f"ac: the recomputation of region {name} saved fewer tensors than forward")
        filled.refuse_past(filled.counter)
        return filled.counter


def _is_parameter(tensor: Tensor) -> bool:
    whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001 (no public name)
    return type(whole) is nn.Parameter
