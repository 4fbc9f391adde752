"""What ranks of the sharding tests run: candidates and redistributions, and what they communicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._ops._einsum_strategy import gen_einsum_strategies

from strategies.shard.candidates.execution import apply, distribute, place, redistribute
from strategies.shard.candidates.layout import Placements, Shape, local_part
from strategies.shard.candidates.operation import LocalOperands
from strategies.shard.candidates.redistribution import reversed_steps, steps_between
from strategies.shard.candidates.sharding_candidate import ShardingCandidate
from tests.counted_collectives import Collectives, Counts
from tests.strategies.shard.candidates.verification import OperandDifference, draw, verify
from tests.strategies.shard.operators.operator_cases import CASES, MESH

SHARDED_ROWS = 2
"""Rows of a shard by which the planted errors know that they are not the dense operator."""


@cache
def mesh_of(shape: Shape) -> DeviceMesh:
    """Return the mesh of all ranks in that shape; its groups are made once."""
    return init_device_mesh("cpu", shape)


def require_equal(found: Sequence[ShardingCandidate], expected: Sequence[ShardingCandidate]) -> None:
    """See that a module has the candidates of its operator, and computes with the same options."""
    assert [(each.name, each.operands, each.communication) for each in found] == [
        (each.name, each.operands, each.communication) for each in expected
    ]
    compute, wanted = (each[0].operation.compute for each in (found, expected))
    assert isinstance(compute, partial)
    assert isinstance(wanted, partial)
    assert compute.keywords == wanted.keywords


def placements_of_dtensor(_rank: int, equation: str) -> list[tuple[Any, ...]]:
    """Return the placements of operands and output that DTensor allows for a product on 2 x 2 ranks."""
    return [
        tuple(spec.placements for spec in (*(each.input_specs or ()), each.output_spec) if spec is not None)
        for each in gen_einsum_strategies(equation, mesh_of((2, 2))).strategies
    ]


Examined: TypeAlias = tuple[tuple[OperandDifference, ...], Counts]
"""What is wrong with a candidate on one rank, and the collectives that it ran."""


def examine(_rank: int, candidates: Sequence[ShardingCandidate], mesh_shape: Shape) -> list[Examined]:
    """Verify candidates; all collectives of a verification are the candidate's."""
    mesh, found = mesh_of(mesh_shape), []
    for candidate in candidates:
        with Collectives() as counter:
            differences = verify(candidate, mesh)
        found.append((differences, counter.counts))
    return found


def dtensor_runs(rank: int, name: str) -> dict[str, tuple[int, list[Placements]]]:
    """Return for each candidate that DTensor has how often it communicates, and where outputs lie.

    What is right communicates nothing, so that rank 0 can run it alone; the others return nothing.
    """
    case = CASES[name]
    mesh = mesh_of(MESH)
    found = {}
    for candidate in () if rank else case.candidates:
        if case.in_dtensor(candidate.choices):
            placed = distribute(candidate, mesh, draw(candidate.operation)[0])
            with Collectives() as counter, torch.no_grad():
                made = case.torch(placed)
            outputs = (made,) if isinstance(made, Tensor) else made
            found[candidate.name] = (counter.counts.total(), [_plain(each) for each in outputs])
    return found


def _plain(tensor: Tensor) -> Placements:
    """Return placements; what DTensor calls masked is partial."""
    assert isinstance(tensor, DTensor)
    return tuple(Partial() if each.is_partial() else each for each in tensor.placements)


def apply_elsewhere(_rank: int, candidate: ShardingCandidate, mesh_shape: Shape, kind: str) -> str:
    """Return the message with which unsuitable arguments are refused."""
    mesh = mesh_of(mesh_shape)
    whole = {operand.name: torch.zeros(operand.shape) for operand in candidate.inputs}
    try:
        if kind == "shape":
            distribute(candidate, mesh, {**whole, "bias": torch.zeros(1)})
        if kind == "names":
            distribute(candidate, mesh, {"input": whole["input"]})
        placed = distribute(candidate, mesh, whole)
        operand = replace(candidate.operand("weight"), placements=(Replicate(), Replicate()))
        apply(candidate, mesh, {**placed, "weight": place(whole["weight"], operand, mesh)})
    except ValueError as error:
        return str(error)
    return "accepted"


def moves(
    _rank: int, cases: Sequence[tuple[Placements, Placements]], shape: Shape, mesh_shape: Shape
) -> list[tuple[bool, bool, Counts, Counts]]:
    """Return for each case whether tensor and gradient arrive, what was promised and what was done."""
    mesh = mesh_of(mesh_shape)
    return [_move(source, target, shape, mesh) for source, target in cases]


def _move(
    source: Placements, target: Placements, shape: Shape, mesh: DeviceMesh
) -> tuple[bool, bool, Counts, Counts]:
    mesh_shape = tuple(mesh.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    back = whole.flip(0)
    steps = steps_between(source, target, shape=shape, mesh_shape=mesh_shape, itemsize=8)
    returning = reversed_steps(steps)
    start = _summand(local_part(whole, source, mesh_shape, coordinate), source, coordinate, mesh_shape)
    start.requires_grad_()
    with Collectives() as counter:
        moved = redistribute(start, forward=steps, backward=returning, mesh=mesh)
        moved.backward(local_part(back, target, mesh_shape, coordinate).clone())
    gradient_placements = tuple(Replicate() if each.is_partial() else each for each in source)
    assert start.grad is not None
    return (
        torch.equal(moved, local_part(whole, target, mesh_shape, coordinate)),
        torch.equal(start.grad, local_part(back, gradient_placements, mesh_shape, coordinate)),
        Counter(
            (phase, step.kind, step.payload_bytes)
            for phase, each in (("forward", steps), ("backward", returning))
            for step in each
            if step.kind is not None
        ),
        counter.counts,
    )


def _summand(part: Tensor, source: Placements, coordinate: Sequence[int], mesh_shape: Shape) -> Tensor:
    """Return unequal summands on partial axes: the first rank has the value and one for each other rank."""
    for placement, index, ranks in zip(source, coordinate, mesh_shape, strict=True):
        if placement.is_partial():
            part = part * ranks if index == 0 else -part
    return part.clone()


def bias_added_by_every_rank(local: LocalOperands) -> Tensor:
    """Compute a linear that adds the bias before the reduction."""
    tensors = local.tensors
    product = nn.functional.linear(tensors["input"], tensors["weight"], tensors["bias"])
    return product if local.finish is None else local.finish(product)


def weight_gradient_slightly_off(local: LocalOperands) -> Tensor:
    """Compute a linear with a weight gradient that is off by one in 10^10 where the input is a shard."""
    tensors = local.tensors
    weight = tensors["weight"]
    if len(tensors["input"]) == SHARDED_ROWS:
        weight = weight * (1 + 1e-10) - weight.detach() * 1e-10
    return nn.functional.linear(tensors["input"], weight, tensors["bias"])


def no_weight_gradient(local: LocalOperands) -> Tensor:
    """Compute a linear that detaches the weight where the input is a shard."""
    tensors = local.tensors
    weight = tensors["weight"].detach() if len(tensors["input"]) == SHARDED_ROWS else tensors["weight"]
    return nn.functional.linear(tensors["input"], weight, tensors["bias"])


def rows_of_the_first_rank(local: LocalOperands) -> Tensor:
    """Look up a sharded vocabulary as if the rank had the first rows."""
    weight = local.tensors["weight"]
    return local.finished(nn.functional.embedding(local.tensors["input"] % len(weight), weight))


def own_statistics(local: LocalOperands) -> Tensor:
    """Normalise a shard of the batch by itself."""
    tensors = local.tensors
    running = (tensors["running_mean"], tensors["running_var"])
    return local.finished(
        nn.functional.batch_norm(
            tensors["input"], *running, tensors["weight"], tensors["bias"], training=True
        )
    )
