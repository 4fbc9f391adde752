"""Verification: a candidate run on a mesh against the dense operator, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strategies.shard.candidates.execution import apply, distribute, place
from strategies.shard.candidates.operation import LabelledOperand, LocalOperands, Operation
from strategies.shard.candidates.sharding_candidate import PlacedOperand, ShardingCandidate

_RELATIVE = 1e-12
"""Largest accepted |actual - expected| / max|expected| of a tensor: ranks sum in another order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandDifference:
    """Something that this rank has and the dense operator has not.

    Fields:
        what: `output`, `gradient of weight`, or `buffer running_mean`.
        problem: difference in words, with the largest relative one where there is one.
    """

    what: str
    problem: str


def verify(candidate: ShardingCandidate, mesh: DeviceMesh) -> tuple[OperandDifference, ...]:
    """Return in what this rank's parts of output and gradients differ from the dense operator's.

    Operands are drawn as by `draw`. Nothing is gathered: every rank compares its own parts, so a rank
    that missed a reduction is seen, and the only collectives are the candidate's. Collective: every
    rank of the mesh calls it.

    Args:
        candidate: candidate to run.
        mesh: mesh of the candidate's shape.

    Raises:
        StrategyError: the mesh has another shape.
    """
    operation = candidate.operation
    whole, upstream = draw(operation, device=mesh.device_type)
    placed = distribute(candidate, mesh, whole)  # before the dense operator updates its buffers
    dense = operation.compute(LocalOperands(tensors=whole))
    expected = (dense,) if isinstance(dense, Tensor) else dense
    torch.autograd.backward(expected, upstream)

    outputs = apply(candidate, mesh, placed)
    gradients = [place(each, to, mesh) for each, to in zip(upstream, candidate.outputs, strict=True)]
    torch.autograd.backward(outputs, gradients)
    compared: list[tuple[str, PlacedOperand, Tensor | None, Tensor | None]] = [
        (operand.name, operand, wanted.detach(), actual)
        for operand, wanted, actual in zip(candidate.outputs, expected, outputs, strict=True)
    ]
    for operand in candidate.inputs:
        wanted, actual = whole[operand.name], placed[operand.name]
        compared.append((f"gradient of {operand.name}", operand, wanted.grad, actual.grad))
        if operand.type == "buffer":
            compared.append((f"buffer {operand.name}", operand, wanted, actual))
    return tuple(
        OperandDifference(what=what, problem=problem)
        for what, operand, wanted, actual in compared
        if (problem := _problem(operand, wanted, actual, mesh))
    )


def draw(operation: Operation, *, device: str = "cpu") -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    """Return whole operands by name, and gradients of the outputs.

    Real numbers are normally distributed, integers uniformly; what is differentiable requires a
    gradient.

    Args:
        operation: operator whose operands are drawn.
        device: type of the device on which they lie; the numbers are the same on every device and rank.
    """
    generator = torch.Generator().manual_seed(0)
    operands = {
        each.name: _drawn(each, operation, generator).to(device).requires_grad_(each.is_differentiable)
        for each in operation.inputs
    }
    return operands, tuple(_drawn(each, operation, generator).to(device) for each in operation.outputs)


def _drawn(operand: LabelledOperand, operation: Operation, generator: torch.Generator) -> Tensor:
    dtype = operation.dtype_of(operand)
    if operand.below is not None:
        return torch.randint(operand.below, operand.shape, generator=generator, dtype=dtype)
    return torch.randn(operand.shape, generator=generator, dtype=dtype)


def _problem(
    operand: PlacedOperand, expected: Tensor | None, actual: Tensor | None, mesh: DeviceMesh
) -> str | None:
    """Return what is wrong with this rank's part of `actual`, `None` where nothing is."""
    if expected is None or actual is None:
        return None if expected is actual else f"is {'missing' if actual is None else 'unexpected'}"
    if not isinstance(actual, DTensor) or actual.placements != operand.placements:
        return f"is not placed as {operand.placements}"
    wanted = place(expected, operand, mesh).to_local()
    part = actual.to_local().detach()
    if (part.shape, part.dtype) != (wanted.shape, wanted.dtype):
        return f"is {tuple(part.shape)} {part.dtype}, not {tuple(wanted.shape)} {wanted.dtype}"
    scale = float(expected.abs().max())
    distance = float((part - wanted).abs().max())
    if distance <= _RELATIVE * scale:  # false for NaN
        return None
    return f"is {distance / scale if scale else distance:.1e} off, more than {_RELATIVE:.0e}"
