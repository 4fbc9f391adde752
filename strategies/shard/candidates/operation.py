"""Description of an operator: which dimensions its operands share, and what is summed over.

Dimensions carry labels, as in an einsum. A label may be sharded over a mesh axis; `None` marks a
dimension that may not, because the operator needs it whole. `linear` with two batch dimensions:

    input (b0, b1, k) x weight (n, k) -> output (b0, b1, n)      + bias (n)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd, prod
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from strategies.base import StrategyError
from strategies.shard.candidates.layout import Placements, Shape

OperandType: TypeAlias = Literal["arg", "param", "buffer", "output"]
Label: TypeAlias = str | None
"""Name of a dimension; `None` for one that is never sharded."""
Choices: TypeAlias = tuple[Label, ...]
"""What each mesh axis does: shard the dimensions with this label, or replicate everything."""
UNCHANGED: Mapping[str, Any] = MappingProxyType({})
"""All operands as they are described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledOperand:
    """An operand as the operator sees it.

    Fields:
        name: role of the operand, `input`, `weight`, `bias`, `output`.
        type: `arg`, `param`, `buffer` or `output`.
        shape: physical shape.
        labels: label of each physical dimension; `None` if it is never sharded.
        logical: the operand as the operator's mathematics has it: each entry is one logical
            dimension and lists the physical ones it is made of.
        is_differentiable: whether it gets a gradient.
        dtype: its own dtype, if it is another than the operator's.
        below: bound of integers, which are from 0 to one less.
    """

    name: str
    type: OperandType
    shape: Shape
    labels: tuple[Label, ...]
    logical: tuple[tuple[int, ...], ...]
    is_differentiable: bool = True
    dtype: torch.dtype | None = None
    below: int | None = None

    @property
    def logical_shape(self) -> Shape:
        """Shape of the operand in the operator's mathematics."""
        return tuple(prod(self.shape[dim] for dim in group) for group in self.logical)

    def placements(self, choices: Choices) -> Placements:
        """Return `Shard` on the axes whose choice is a dimension of this operand, else `Replicate`."""
        return tuple(
            Shard(self.labels.index(choice)) if choice is not None and choice in self.labels else Replicate()
            for choice in choices
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's shard of a label: its index among `count` even ones."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOperands:
    """The operands that the operator computes from on one rank.

    Fields:
        tensors: local parts of the operands, by name.
        parts: the rank's part of every label that is sharded.
        synchronise: sums a statistic, given by name, over the ranks that have a part of what it
            is a sum of.
        finish: redistribution of the first term from the layout in which it was computed to the output's;
            `None` where they are the same. Other terms are added after it.
    """

    tensors: Mapping[str, Tensor]
    parts: Mapping[str, Part] = field(default_factory=dict)
    synchronise: Callable[[str, Tensor], Tensor] = lambda _name, statistic: statistic
    finish: Callable[[Tensor], Tensor] | None = None

    def part(self, label: str) -> Part:
        """Return the rank's part of a label, the whole where it is not sharded."""
        return self.parts.get(label, Part())

    def finished(self, term: Tensor) -> Tensor:
        """Return the first term in the output's layout."""
        return term if self.finish is None else self.finish(term)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operator with its shapes: a sum of terms.

    Over a label that is summed over, a term is linear in each of its operands; along other labels the
    operator works on every entry by itself.

    Fields:
        name: the operator, `linear`.
        outputs: operands that it makes; where there are several, nothing is summed over.
        terms: names of the operands that are multiplied with each other, a tuple a term. What the
            first term has and the output has not is summed over.
        compute: the operator on local parts; on whole operands it is the dense operator. It finishes
            the first term (`LocalOperands.finished`) before it adds others.
        naming: the name of a candidate, from the operator and what each mesh axis shards.
        is_classic: whether ColossalAI has a candidate, from what the axes of more than one rank shard; `None`
            where it has all of them.
        forward_flops: FLOPs of the whole operator forward; they divide over sharded axes.
        statistics: sums over the first term that all of it needs, the way a batch norm needs the
            mean: each is synchronised in the forward, and its gradient in the backward.
        limits: labels that can be cut into fewer shards than their size, and into how many.
        dtype: dtype of all operands that have none of their own.
    """

    name: str
    inputs: tuple[LabelledOperand, ...]
    outputs: tuple[LabelledOperand, ...]
    terms: tuple[tuple[str, ...], ...]
    compute: Callable[[LocalOperands], Tensor | tuple[Tensor, ...]]
    naming: Callable[[Operation, Choices], str]
    is_classic: Callable[[Choices], bool] | None = None
    forward_flops: int = 0
    statistics: tuple[LabelledOperand, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    dtype: torch.dtype = torch.float32

    def typed(
        self,
        dtype: torch.dtype | None = None,
        *,
        dtypes: Mapping[str, torch.dtype] = UNCHANGED,
        types: Mapping[str, OperandType] = UNCHANGED,
    ) -> Operation:
        """Return the operator on operands of other dtypes or types.

        Args:
            dtype: dtype of all operands that have none of their own; `None` for the one they have.
            dtypes: dtypes of operands that have another, by name, as autocast makes them.
            types: types of operands by name: `param` for a weight, `arg` for what the graph computes.
        """

        def retyped(operand: LabelledOperand) -> LabelledOperand:
            own, type_ = dtypes.get(operand.name, operand.dtype), types.get(operand.name, operand.type)
            return replace(operand, dtype=own, type=type_)

        dtype = self.dtype if dtype is None else dtype
        precise = torch.promote_types(dtype, torch.float32)  # statistics of half precision are single
        return replace(
            self,
            dtype=dtype,
            inputs=tuple(map(retyped, self.inputs)),
            outputs=tuple(map(retyped, self.outputs)),
            statistics=tuple(replace(each, dtype=precise) for each in self.statistics),
        )

    @property
    def backward_flops(self) -> int:
        """FLOPs of all gradients: a product has two operands, and the gradient of each is a product."""
        return 2 * self.forward_flops

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every label, in the order in which operands have them.

        Where it differs between operands, as in a view, the size that divides all.
        """
        found = dict(self.limits)
        for operand in (*self.inputs, *self.outputs):
            for label, size in zip(operand.labels, operand.shape, strict=True):
                if label is not None:
                    found[label] = gcd(size, found.get(label, 0))
        return found

    def choices(self, mesh_shape: Shape) -> Iterator[Choices]:
        """Yield every choice vector, an entry a mesh axis, that cuts all dimensions evenly.

        The first replicates everything; an axis of size 1 always does.
        """
        sizes = self.sizes
        options = [(None, *sizes) if ranks > 1 else (None,) for ranks in mesh_shape]
        for choices in product(*options):
            shards = {
                label: prod(n for n, choice in zip(mesh_shape, choices, strict=True) if choice == label)
                for label in sizes
            }
            if not any(sizes[label] % count for label, count in shards.items()):
                yield choices

    def term_of(self, name: str) -> frozenset[str]:
        """Return the labels that meet in the gradient of an operand: of its term and of the output."""
        names = next(term for term in self.terms if name in term)
        operands = (*(operand for operand in self.inputs if operand.name in names), *self.outputs)
        return frozenset(label for operand in operands for label in operand.labels if label is not None)

    def dtype_of(self, operand: LabelledOperand) -> torch.dtype:
        """Return the dtype of an operand."""
        return self.dtype if operand.dtype is None else operand.dtype


def operand(
    name: str,
    shape: Sequence[int],
    labels: Sequence[Label],
    type: OperandType = "arg",  # noqa: A002 (the field's name)
    *,
    logical: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | None = None,
) -> LabelledOperand:
    """Return a differentiable operand; without `logical` its mathematics sees every dimension by itself."""
    groups = [(dim,) for dim in range(len(shape))] if logical is None else logical
    return LabelledOperand(
        name=name,
        type=type,
        shape=tuple(shape),
        labels=tuple(labels),
        logical=tuple(map(tuple, groups)),
        dtype=dtype,
    )


def broadcast(where: str, *shapes: Shape) -> Shape:
    """Return the shape to which `shapes` broadcast. Raises StrategyError: they do not."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        texts = " and ".join(map(str, shapes))
        raise StrategyError(where, f"must broadcast with each other, got {texts}") from None


def broadcast_labels(shape: Shape, onto: Shape, labels: Sequence[Label]) -> tuple[Label, ...]:
    """Return the labels of an operand that broadcasts to the shape `onto` with these `labels`."""
    start = len(onto) - len(shape)
    return tuple(
        label if size == full else None
        for size, full, label in zip(shape, onto[start:], labels[start:], strict=True)
    )
