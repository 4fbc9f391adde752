"""Following operators: they compute where their inputs lie, and communicate at most the sum they take.

The peer has no candidates of their own for them, they take those of their producer; here they are derived
like all others, so `classic` and `complete` are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from strategies.shard.candidates.candidate import Candidate
from strategies.shard.candidates.cost import Hardware
from strategies.shard.candidates.enumeration import enumerate_candidates
from strategies.shard.candidates.layout import checked_shape, sharding_sequence
from strategies.shard.candidates.operation import Choice, Dimensions, LocalOperands, Operation

Function: TypeAlias = Callable[[LocalOperands], Tensor | tuple[Tensor, ...]]


def follow(
    name: str,
    inputs: Sequence[Dimensions],
    outputs: Sequence[Dimensions],
    function: Function,
    mesh_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    hardware: Hardware,
) -> tuple[Candidate, ...]:
    """Return all candidates of an operator without FLOPs that PyTorch counts, full replication first.

    Args:
        name: of the operator.
        inputs: operands it reads, all in one term.
        outputs: operands it makes.
        function: the operator on local parts; it need not finish.
        mesh_shape: sizes of the mesh axes.
        dtype: of all operands.
        hardware: what costs are reckoned on.

    Raises:
        StrategyError: the mesh is none.
    """
    operation = Operation(
        name=name,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        terms=(tuple(operand.name for operand in inputs),),
        dtype=dtype,
        forward_flops=0,
        backward_flops=0,
        compute=partial(_compute, function=function),
    )
    return enumerate_candidates(
        operation, checked_shape("mesh_shape", mesh_shape), "complete", name=_name, hardware=hardware
    )


def _compute(local: LocalOperands, *, function: Function) -> Tensor | tuple[Tensor, ...]:
    made = function(local)
    return local.finished(made) if isinstance(made, Tensor) else made


def _name(operation: Operation, choices: tuple[Choice, ...]) -> str:
    """Return `RS0 = S0R x R`, the placements of the output, or of the first of several, and of all inputs."""
    specs = [
        "".join(sharding_sequence(operand.placements(choices), len(operand.shape))) or "R"
        for operand in (operation.outputs[0], *operation.inputs)
    ]
    return f"{specs[0]} = {' x '.join(specs[1:])}"
