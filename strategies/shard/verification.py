"""Verification: a candidate run on a mesh against the dense operator, element by element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strategies.shard.candidates import Candidate, Operand
from strategies.shard.execution import apply, distribute, place
from strategies.shard.operation import LocalOperands


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that this rank has and the dense operator has not.

    Fields:
        what: `output`, or `gradient of weight`.
        problem: in words, with the largest relative difference where there is one.
    """

    what: str
    problem: str


def verify(
    candidate: Candidate, mesh: DeviceMesh, *, relative: float = 1e-12, seed: int = 0
) -> tuple[Difference, ...]:
    """Return in what this rank's parts of output and gradients differ from the dense operator's.

    Operands and the gradient of the output are drawn from a normal distribution, in the dtype of the
    candidate. Nothing is gathered: every rank compares its own parts, so a rank that missed a reduction
    is seen, and the only collectives are the candidate's. Collective: every rank of the mesh calls it.

    Args:
        candidate: what to run.
        mesh: of the candidate's shape.
        relative: largest accepted |actual - expected| / max|expected| of one tensor; sums over ranks
            are taken in another order than the dense ones.
        seed: of the drawn operands; the same on all ranks.

    Raises:
        StrategyError: the mesh has another shape.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = {
        operand.name: _drawn(operand, candidate, mesh, generator).requires_grad_()
        for operand in candidate.inputs
    }
    upstream = _drawn(candidate.output, candidate, mesh, generator)
    dense = candidate.operation.compute(LocalOperands(tensors=whole))
    dense.backward(upstream)  # type: ignore[no-untyped-call]

    placed = distribute(candidate, mesh, whole)
    output = apply(candidate, mesh, placed)
    output.backward(place(upstream, candidate.output, mesh))  # type: ignore[no-untyped-call]
    return tuple(
        Difference(what=what, problem=problem)
        for what, operand, expected, actual in (
            ("output", candidate.output, dense.detach(), output),
            *(
                (f"gradient of {operand.name}", operand, whole[operand.name].grad, placed[operand.name].grad)
                for operand in candidate.inputs
            ),
        )
        if (problem := _problem(operand, expected, actual, mesh, relative))
    )


def _drawn(operand: Operand, candidate: Candidate, mesh: DeviceMesh, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(operand.shape, generator=generator, dtype=candidate.operation.dtype)
    return drawn.to(mesh.device_type)


def _problem(
    operand: Operand, expected: Tensor | None, actual: Tensor | None, mesh: DeviceMesh, relative: float
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
    if distance <= relative * scale:  # false for NaN
        return None
    return f"is {distance / scale if scale else distance:.1e} off, more than {relative:.0e}"
