"""Derivation: from what each mesh axis shards to placements, communication and cost.

The rules hold for every operator that `operation` can describe, one mesh axis at a time:

* an operand is sharded where it has the chosen dimension, else replicated;
* the output is partial where the chosen dimension is summed over;
* the gradient of an operand is partial where the dimension is not its own but meets in its term;
* a statistic is partial under the same condition, and so is its gradient.

Whatever is partial is then reduced to where it belongs; that is all the communication there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.base import StrategyError
from strategies.estimate.machine import A100, Machine
from strategies.shard.candidates.candidate_cost import CandidateCost, communication_s
from strategies.shard.candidates.layout import Placements, Shape
from strategies.shard.candidates.operation import Choices, LabelledOperand, Operation
from strategies.shard.candidates.redistribution import Collective, collectives, reversed_steps
from strategies.shard.candidates.sharding_candidate import PlacedOperand, ShardingCandidate


def derive(
    operation: Operation,
    choices: Choices,
    mesh_shape: Shape,
    *,
    name: str,
    machine: Machine = A100,
    output: Placements | None = None,
) -> ShardingCandidate:
    """Return the candidate in which mesh axis `a` shards the dimension `choices[a]`.

    Args:
        choices: label that each mesh axis shards, or `None`.
        mesh_shape: sizes of the mesh axes.
        machine: speed of a rank, by which its cost is reckoned.
        output: placements of the output; by default those in which it is computed, reduced to `Replicate`.
            A shard of what is partial is a reduce-scatter.

    Raises:
        StrategyError: a dimension cannot be cut evenly, `output` shards one without a label, or there
            are several outputs to place.
    """
    if output is not None and len(operation.outputs) > 1:
        raise StrategyError("output", f"cannot be placed where there are {len(operation.outputs)}")
    term = operation.terms[0]
    placing = _Placing(operation, mesh_shape)
    made = tuple(placing.output(each, choices, output) for each in operation.outputs)
    following = _choices_of(operation.outputs[0], made[0].placements)
    inputs = tuple(
        placing.input(each, choices if each.name in term else following) for each in operation.inputs
    )
    statistics = tuple(placing.meeting(term[0], each, choices) for each in operation.statistics)
    communication = _communication(inputs, statistics, made)
    return ShardingCandidate(
        name=name,
        operation=operation,
        choices=choices,
        mesh_shape=mesh_shape,
        operands=(*inputs, *made),
        communication=communication,
        cost=_cost(operation, choices, (*inputs, *made), communication, machine),
        statistics=statistics,
    )


@dataclass(frozen=True)
class _Placing:
    """Places operands of one operator on one mesh."""

    operation: Operation
    mesh_shape: Shape

    def input(self, operand: LabelledOperand, choices: Choices) -> PlacedOperand:
        placed = self.meeting(operand.name, operand, choices)
        return placed if operand.is_differentiable else replace(placed, computed=placed.placements)

    def output(self, output: LabelledOperand, choices: Choices, wanted: Placements | None) -> PlacedOperand:
        placed = self.meeting(self.operation.terms[0][0], output, choices)
        reduced = tuple(Replicate() if each.is_partial() else each for each in placed.computed)
        return replace(placed, placements=reduced if wanted is None else wanted)

    def meeting(self, name: str, operand: LabelledOperand, choices: Choices) -> PlacedOperand:
        """Return an operand with what is summed for it in the term of `name`: partial where that has more."""
        placements = operand.placements(choices)
        summed = self.operation.term_of(name)
        computed = tuple(
            Partial() if choice in summed and placement.is_replicate() else placement
            for choice, placement in zip(choices, placements, strict=True)
        )
        return PlacedOperand(
            name=operand.name,
            type=operand.type,
            shape=operand.shape,
            logical_shape=operand.logical_shape,
            placements=placements,
            computed=computed,
            mesh_shape=self.mesh_shape,
            itemsize=self.operation.dtype_of(operand).itemsize,
        )


def _choices_of(output: LabelledOperand, placements: Placements) -> Choices:
    """Return what the axes shard for terms that are added to the output where it lies."""
    labels = tuple(
        output.labels[placement.dim] if isinstance(placement, Shard) else None for placement in placements
    )
    for placement, label in zip(placements, labels, strict=True):
        if label is None and not placement.is_replicate():
            problem = f"cannot be placed as {placement!r}"
            raise StrategyError("output", f"{problem}; use Replicate or another Shard")
    return labels


def _communication(
    inputs: tuple[PlacedOperand, ...],
    statistics: tuple[PlacedOperand, ...],
    outputs: tuple[PlacedOperand, ...],
) -> tuple[Collective, ...]:
    """Return the collectives of forward and backward; what forward reduces, backward undoes."""
    found: list[Collective] = []
    for operand in (*statistics, *outputs):
        found += collectives(operand.reduction, phase="forward", operand=operand.name)
    for operand in outputs:
        found += collectives(reversed_steps(operand.reduction), phase="backward", operand=operand.name)
    for operand in (*statistics, *inputs):
        found += collectives(operand.reduction, phase="backward", operand=operand.name)
    return tuple(found)


def _cost(
    operation: Operation,
    choices: Choices,
    operands: tuple[PlacedOperand, ...],
    communication: tuple[Collective, ...],
    machine: Machine,
) -> CandidateCost:
    mesh_shape = operands[0].mesh_shape
    ranks = prod(size for size, choice in zip(mesh_shape, choices, strict=True) if choice is not None)
    forward, backward = operation.forward_flops // ranks, operation.backward_flops // ranks
    return CandidateCost(
        forward_flops=forward,
        backward_flops=backward,
        communicated_bytes=sum(collective.payload_bytes for collective in communication),
        memory_bytes=sum(operand.local_bytes for operand in operands),
        compute_s=machine.compute_s(forward + backward),
        communication_s=communication_s(machine, communication),
    )
