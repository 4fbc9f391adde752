"""Execution: a candidate realised on a device mesh, with exactly the collectives that it promises.

Operands are DTensors, what is computed are their local parts, and every change of layout runs the steps
of its plan one by one. DTensor's own dispatch is not asked: which collectives it picks differs between
releases and between shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from strategies.base import StrategyError
from strategies.shard.candidates.layout import local_part
from strategies.shard.candidates.operation import LocalOperands, Part
from strategies.shard.candidates.redistribution import LayoutStep, Steps, reversed_steps
from strategies.shard.candidates.sharding_candidate import PlacedOperand, ShardingCandidate


def distribute(
    candidate: ShardingCandidate, mesh: DeviceMesh, operands: Mapping[str, Tensor]
) -> dict[str, DTensor]:
    """Return whole operands as leaf DTensors in the candidate's placements, without communication.

    Args:
        operands: whole operands by name, the same on every rank; `requires_grad` is kept.

    Raises:
        StrategyError: the mesh has another shape, or an operand is missing, unknown or of another shape.
    """
    _check_mesh(candidate, mesh)
    _check_names(candidate, operands)
    return {operand.name: place(operands[operand.name], operand, mesh) for operand in candidate.inputs}


def place(whole: Tensor, operand: PlacedOperand, mesh: DeviceMesh) -> DTensor:
    """Return one whole operand as `distribute` does.

    Raises:
        StrategyError: it has another shape, or this rank is not part of the mesh.
    """
    if whole.shape != operand.shape:
        problem = f"must have shape {operand.shape}"
        raise StrategyError(f"operands.{operand.name}", f"{problem}, got {tuple(whole.shape)}")
    part = local_part(whole.detach(), operand.placements, operand.mesh_shape, _coordinate(mesh))
    tensor = _as_dtensor(part.clone(memory_format=torch.contiguous_format), operand, mesh)
    tensor.requires_grad_(whole.requires_grad)
    return tensor


def apply(
    candidate: ShardingCandidate, mesh: DeviceMesh, operands: Mapping[str, DTensor]
) -> tuple[DTensor, ...]:
    """Return the outputs of the operator, computed where the candidate says. Buffers are updated in place.

    An output lies where the candidate places it. So does, after the backward, the gradient of each operand.

    Args:
        mesh: mesh of the candidate's shape.
        operands: operands by name, in the candidate's placements.

    Raises:
        StrategyError: the mesh has another shape, or an operand is missing, unknown or placed otherwise.
    """
    _check_mesh(candidate, mesh)
    _check_names(candidate, operands)
    tensors = {operand.name: _entered(operands[operand.name], operand, mesh) for operand in candidate.inputs}
    reduction = candidate.output.reduction
    finish = partial(redistribute, forward=reduction, backward=reversed_steps(reduction), mesh=mesh)
    made = candidate.operation.compute(
        LocalOperands(
            tensors=tensors,
            parts=rank_parts(candidate, _coordinate(mesh)),
            synchronise=partial(_synchronised, candidate=candidate, mesh=mesh),
            finish=finish if reduction else None,
        )
    )
    outputs = (made,) if isinstance(made, Tensor) else made
    return tuple(
        _as_dtensor(local.contiguous(), operand, mesh)
        for local, operand in zip(outputs, candidate.outputs, strict=True)
    )


def rank_parts(candidate: ShardingCandidate, coordinate: Sequence[int]) -> dict[str, Part]:
    """Return the part of every sharded label that the rank at `coordinate` of the mesh has.

    Where two axes shard one, the axis further left cuts first.
    """
    parts: dict[str, Part] = {}
    for label, ranks, index in zip(candidate.choices, candidate.mesh_shape, coordinate, strict=True):
        if label is not None:
            outer = parts.get(label, Part())
            parts[label] = Part(index=outer.index * ranks + index, count=outer.count * ranks)
    return parts


def redistribute(local: Tensor, *, forward: Steps, backward: Steps, mesh: DeviceMesh) -> Tensor:
    """Return `local` after the steps `forward`; its gradient goes through `backward`."""
    if not forward and not backward:
        return local
    moved: Tensor = _Redistribution.apply(local, forward, backward, mesh)  # type: ignore[no-untyped-call]
    return moved


def _synchronised(name: str, statistic: Tensor, *, candidate: ShardingCandidate, mesh: DeviceMesh) -> Tensor:
    """Return a statistic summed over ranks; its gradient is summed over the same."""
    reduction = next(each for each in candidate.statistics if each.name == name).reduction
    return redistribute(statistic, forward=reduction, backward=reduction, mesh=mesh)


class _Redistribution(torch.autograd.Function):
    """Steps in the forward, other steps in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: Tensor, forward: Steps, backward: Steps, mesh: DeviceMesh
    ) -> Tensor:
        ctx.steps, ctx.mesh = backward, mesh
        return _run(local, forward, mesh) if forward else local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _run(gradient, ctx.steps, ctx.mesh), None, None, None


def _run(local: Tensor, steps: Steps, mesh: DeviceMesh) -> Tensor:
    for step in steps:
        local = _moved(local, step, mesh)
    return local


def _moved(local: Tensor, step: LayoutStep, mesh: DeviceMesh) -> Tensor:
    """Return the local part after one step.

    Operators of `_c10d_functional` are what `torch.compile`, selective AC and meters know.
    """
    functional = torch.ops._c10d_functional  # noqa: SLF001 (torch has no public functional collectives)
    group = mesh.get_group(step.axis).group_name
    ranks, source, target = step.ranks, step.source, step.target
    match step.kind:
        case None:
            assert isinstance(target, Shard)
            part = local.chunk(ranks, target.dim)[mesh.get_local_rank(step.axis)]
            # a view would keep the whole alive, and code could not change it in place
            return part.clone(memory_format=torch.contiguous_format)
        case "all_reduce":
            return _waited(functional.all_reduce(local.contiguous(), "sum", group))
        case "reduce_scatter":
            assert isinstance(target, Shard)
            stacked = torch.cat(local.chunk(ranks, target.dim)).contiguous()
            return _waited(functional.reduce_scatter_tensor(stacked, "sum", ranks, group))
        case "all_gather":
            assert isinstance(source, Shard)
            gathered = _waited(functional.all_gather_into_tensor(local.contiguous(), ranks, group))
            return torch.cat(gathered.chunk(ranks), source.dim)
        case "all_to_all":
            assert isinstance(source, Shard)
            assert isinstance(target, Shard)
            pieces = torch.cat(local.chunk(ranks, target.dim)).contiguous()
            even = [pieces.shape[0] // ranks] * ranks
            received = _waited(functional.all_to_all_single(pieces, even, even, group))
            return torch.cat(received.chunk(ranks), source.dim)


def _waited(tensor: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)  # noqa: SLF001 (as above)
    return done


def _entered(tensor: DTensor, operand: PlacedOperand, mesh: DeviceMesh) -> Tensor:
    """Return the local part of an operand, the gradient of which is reduced when it comes back."""
    if tensor.placements != operand.placements:
        problem = f"must be placed as {operand.placements}"
        raise StrategyError(f"operands.{operand.name}", f"{problem}, got {tuple(tensor.placements)}")
    return redistribute(tensor.to_local(), forward=(), backward=operand.reduction, mesh=mesh)


def _as_dtensor(local: Tensor, operand: PlacedOperand, mesh: DeviceMesh) -> DTensor:
    stride = torch.empty(operand.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, operand.placements, run_check=False, shape=torch.Size(operand.shape), stride=stride
    )


def _check_mesh(candidate: ShardingCandidate, mesh: DeviceMesh) -> None:
    if tuple(mesh.shape) != candidate.mesh_shape:
        raise StrategyError("mesh", f"must have shape {candidate.mesh_shape}, got {tuple(mesh.shape)}")


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StrategyError("mesh", "this rank is not part of it")
    return coordinate


def _check_names(candidate: ShardingCandidate, operands: Mapping[str, Tensor]) -> None:
    expected = {operand.name for operand in candidate.inputs}
    if set(operands) != expected:
        raise StrategyError("operands", f"must be {sorted(expected)}, got {sorted(operands)}")
