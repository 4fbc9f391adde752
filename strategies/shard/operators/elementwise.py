"""`elementwise`: a function of single elements, of one tensor or of several that broadcast.

A mesh axis replicates or shards any dimension of the output: `(d + 1)^axes` candidates of `d` dimensions
where everything divides. An operand that is broadcast over a sharded dimension is whole, and its gradient
is all-reduced. These are the candidates of DTensor's rule for pointwise operators whose inputs are not
partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.derivation import DEFAULT_HARDWARE
from strategies.shard.candidates.following import follow
from strategies.shard.candidates.layout import checked_shape
from strategies.shard.candidates.operation import LocalOperands, broadcast, broadcast_labels, described


def candidates(
    shapes: Sequence[Sequence[int]],
    mesh_shape: Sequence[int],
    *,
    function: Callable[..., Tensor],
    dtype: torch.dtype = torch.float32,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[Candidate, ...]:
    """Return the sharding candidates of `function(*tensors)`, full replication first.

    The operands are `input` if there is one, else `input_0`, `input_1`, …

    Args:
        shapes: of the tensors; they broadcast.
        mesh_shape: sizes of the mesh axes.
        function: `torch.add`, `torch.mul`, `F.gelu`, …; differentiable, without random numbers.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: a shape is none, there is none, or they do not broadcast.
    """
    if not shapes:
        raise StrategyError("shapes", "must be at least one, got none")
    inputs = [checked_shape(f"shapes[{index}]", shape) for index, shape in enumerate(shapes)]
    onto = broadcast("shapes", *inputs)
    labels = [f"d{dim}" for dim in range(len(onto))]
    names = [f"input_{index}" for index in range(len(inputs))] if len(inputs) > 1 else ["input"]
    return follow(
        "elementwise",
        [
            described(name, shape, broadcast_labels(shape, onto, labels))
            for name, shape in zip(names, inputs, strict=True)
        ],
        [described("output", onto, labels, type="output")],
        partial(_apply, function=function),
        mesh_shape,
        dtype=dtype,
        hardware=hardware,
    )


def _apply(local: LocalOperands, *, function: Callable[..., Tensor]) -> Tensor:
    return function(*local.tensors.values())
