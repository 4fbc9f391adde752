"""State of a tensor between two operators on one mesh axis: where its value lies, and its gradient.

    R      every rank has the whole tensor, and gets its whole gradient
    R*     every rank has the whole tensor, and gets one summand of its gradient
    S<d>   every rank has an even shard of dimension d, and gets the gradient of that shard

A consumer that shards what its input is multiplied with, as a column-parallel linear does, reads `R*`.
Several such consumers of one tensor can share the all-reduce that makes its gradient whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.shard.candidates.layout import Shape, local_shape
from strategies.shard.candidates.redistribution import Collective, Steps, collectives, steps_between


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Placements of a tensor, and of its gradient, on the one mesh axis."""

    value: Placement
    gradient: Placement

    def __str__(self) -> str:
        if isinstance(self.value, Shard):
            return f"S{self.value.dim}"
        return "R*" if self.gradient.is_partial() else "R"

    @property
    def dim(self) -> int | None:
        """The sharded dimension; `None` where every rank has the whole tensor."""
        return self.value.dim if isinstance(self.value, Shard) else None


WHOLE = State(value=Replicate(), gradient=Replicate())
SUMMED = State(value=Replicate(), gradient=Partial())


def sharded(dim: int) -> State:
    """Return the state in which dimension `dim` is sharded."""
    return State(value=Shard(dim), gradient=Shard(dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorValue:
    """A tensor of a model, without its elements.

    Fields:
        shape: shape of the whole tensor.
        needs_gradient: whether a gradient comes back to it.
    """

    shape: Shape
    dtype: torch.dtype
    needs_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorValue:
        """Return what is known of a tensor, which may have no memory."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, needs_gradient=tensor.requires_grad)

    def local_bytes(self, state: State, ranks: int) -> int:
        """Return the bytes that one rank holds of it."""
        local = local_shape(self.shape, (state.value,), (ranks,))
        return torch.Size(local).numel() * self.dtype.itemsize

    def can_be_cut(self, dim: int, ranks: int) -> bool:
        """Return whether `dim` has even shards."""
        return self.shape[dim] >= ranks and self.shape[dim] % ranks == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Redistribution of a tensor, and of its gradient, from one state to another.

    Fields:
        backward: steps of its gradient, on the way back.
    """

    forward: Steps = ()
    backward: Steps = ()

    def collectives(self, operand: str) -> tuple[Collective, ...]:
        """Return those of the steps that communicate."""
        return (
            *collectives(self.forward, phase="forward", operand=operand),
            *collectives(self.backward, phase="backward", operand=operand),
        )


def move(source: State, target: State, value: TensorValue, ranks: int) -> Move | None:
    """Return the redistribution of `value` from `source` to `target`; `None` if there is none.

    A tensor whose gradient comes in summands (`R*`) cannot get to a state whose gradient is whole.
    """
    if source.gradient.is_partial() and not target.gradient.is_partial():
        return None
    sizes = {"shape": value.shape, "mesh_shape": (ranks,), "itemsize": value.dtype.itemsize}
    forward = steps_between((source.value,), (target.value,), **sizes)
    backward = steps_between((target.gradient,), (source.gradient,), **sizes) if value.needs_gradient else ()
    return Move(forward=forward, backward=backward)
