"""Derivation: from what each mesh axis shards to placements, communication and cost.

The rules hold for every operator that `operation` can describe, one mesh axis at a time:

* an operand is sharded where it has the chosen dimension, else replicated;
* the output is partial where the chosen dimension is summed over;
* the gradient of an operand is partial where the dimension is not its own but meets in its term;
* a statistic is partial under the same condition, and so is its gradient.

Whatever is partial is then reduced to where it belongs; that is all the communication there is.
"""

from __future__ import annotations

from math import prod

from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.errors import StrategyError
from strategies.shard.candidates.candidate import Candidate, Operand
from strategies.shard.candidates.cost import DEFAULT_HARDWARE, Cost, Hardware
from strategies.shard.candidates.layout import Placements, Shape
from strategies.shard.candidates.operation import Choice, Dimensions, Operation
from strategies.shard.candidates.redistribution import Collective, collectives, reversed_plan

__all__ = ["DEFAULT_HARDWARE", "derive"]


def derive(
    operation: Operation,
    choices: tuple[Choice, ...],
    mesh_shape: Shape,
    *,
    name: str,
    hardware: Hardware = DEFAULT_HARDWARE,
    output: Placements | None = None,
) -> Candidate:
    """Return the candidate in which mesh axis `a` shards the dimension `choices[a]`.

    Args:
        operation: the operator.
        choices: one a mesh axis.
        mesh_shape: sizes of the mesh axes.
        name: of the candidate.
        hardware: what its cost is reckoned on.
        output: where the output shall lie; by default where it is computed, reduced to `Replicate`. A
            shard of what is partial is a reduce-scatter.

    Raises:
        StrategyError: a dimension cannot be cut evenly, `output` shards one without a label, or there
            are several outputs to place.
    """
    if output is not None and len(operation.outputs) > 1:
        raise StrategyError("output", f"cannot be placed where there are {len(operation.outputs)}")
    first_term = operation.terms[0]
    made = tuple(_made(operation, each, choices, mesh_shape, output) for each in operation.outputs)
    following = _choices_of(operation.outputs[0], made[0].placements)
    inputs = tuple(
        _input(operation, operand, choices if operand.name in first_term else following, mesh_shape)
        for operand in operation.inputs
    )
    statistics = tuple(
        _operand(operation, each, *_met(operation, first_term[0], each, choices), mesh_shape)
        for each in operation.statistics
    )
    communication = _communication(inputs, statistics, made)
    return Candidate(
        name=name,
        operation=operation,
        choices=choices,
        mesh_shape=mesh_shape,
        operands=(*inputs, *made),
        communication=communication,
        cost=_cost(operation, choices, (*inputs, *made), communication, hardware),
        statistics=statistics,
    )


def _made(
    operation: Operation,
    output: Dimensions,
    choices: tuple[Choice, ...],
    mesh_shape: Shape,
    wanted: Placements | None,
) -> Operand:
    _, computed = _met(operation, operation.terms[0][0], output, choices)
    placements = _reduced(computed) if wanted is None else wanted
    return _operand(operation, output, placements, computed, mesh_shape)


def _met(
    operation: Operation, name: str, operand: Dimensions, choices: tuple[Choice, ...]
) -> tuple[Placements, Placements]:
    """Return where an operand lies, and where what is summed for it in the term of `name` is computed."""
    placements = operand.placements(choices)
    meeting = operation.term_of(name)
    return placements, tuple(
        Partial() if choice in meeting and placement.is_replicate() else placement
        for choice, placement in zip(choices, placements, strict=True)
    )


def _reduced(placements: Placements) -> Placements:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _choices_of(output: Dimensions, placements: Placements) -> tuple[Choice, ...]:
    """Return what the axes shard for terms that are added to the output where it lies."""
    labels = tuple(
        output.labels[placement.dim] if isinstance(placement, Shard) else None for placement in placements
    )
    for placement, label in zip(placements, labels, strict=True):
        if label is None and not placement.is_replicate():
            raise StrategyError(
                "output", f"cannot be placed as {placement!r}; use Replicate or another Shard"
            )
    return labels


def _input(
    operation: Operation, operand: Dimensions, choices: tuple[Choice, ...], mesh_shape: Shape
) -> Operand:
    placements, gradient = _met(operation, operand.name, operand, choices)
    computed = gradient if operand.is_differentiable else placements
    return _operand(operation, operand, placements, computed, mesh_shape)


def _operand(
    operation: Operation,
    operand: Dimensions,
    placements: Placements,
    computed: Placements,
    mesh_shape: Shape,
) -> Operand:
    return Operand(
        name=operand.name,
        type=operand.type,
        shape=operand.shape,
        logical_shape=operand.logical_shape,
        placements=placements,
        computed=computed,
        mesh_shape=mesh_shape,
        itemsize=operation.dtype_of(operand).itemsize,
    )


def _communication(
    inputs: tuple[Operand, ...], statistics: tuple[Operand, ...], outputs: tuple[Operand, ...]
) -> tuple[Collective, ...]:
    found: list[Collective] = []
    for operand in (*statistics, *outputs):
        found += collectives(operand.reduction, phase="forward", operand=operand.name)
    for operand in outputs:
        found += collectives(reversed_plan(operand.reduction), phase="backward", operand=operand.name)
    for operand in (*statistics, *inputs):
        found += collectives(operand.reduction, phase="backward", operand=operand.name)
    return tuple(found)


def _cost(
    operation: Operation,
    choices: tuple[Choice, ...],
    operands: tuple[Operand, ...],
    communication: tuple[Collective, ...],
    hardware: Hardware,
) -> Cost:
    mesh_shape = operands[0].mesh_shape
    ranks = prod(size for size, choice in zip(mesh_shape, choices, strict=True) if choice is not None)
    forward, backward = operation.forward_flops // ranks, operation.backward_flops // ranks
    return Cost(
        forward_flops=forward,
        backward_flops=backward,
        communicated_bytes=sum(collective.payload_bytes for collective in communication),
        memory_bytes=sum(operand.local_bytes for operand in operands),
        compute_s=hardware.compute_s(forward + backward),
        communication_s=hardware.communication_s(communication),
    )
