"""Sizes of the tensors that a step computes with, and the operators before its first block."""

from __future__ import annotations

from typing import NamedTuple


class PriorOperator(NamedTuple):
    """An operator that runs before the first block, and belongs to its forward.

    Fields:
        signature: its name, with type and number of dimensions of each operand.
        skips: operators of the same signature that run before it, behind the one before, and do not belong.
    """

    signature: str
    skips: int


class TensorSize(NamedTuple):
    """The size of a tensor that a call of a block computes with.

    Fields:
        name: `input 0` or `parameter up.weight`, by the name within the block.
        shape: global shape.
        kind: type of its elements and of its device, `float32 on cpu`.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
