"""What a plan of chunks says of a model, or how its results are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from strategies.base import StrategyError
from strategies.chunk import ChunkPlan

_NEAR = 1e-3  # share of the largest element


def said_or_error(make: Callable[[], nn.Module]) -> str:
    """Return "right", "wrong outputs" or "wrong gradients", or "refused: " and what is named first."""
    torch.manual_seed(0)
    plain, x = make(), torch.randn(24, 6, 16)
    try:
        planned = ChunkPlan.make(plain, (x,), training=True, fraction=0.6).apply(copy.deepcopy(plain))
        (expected, *gradients), (made, *others) = _results(plain, x), _results(planned, x)
    except StrategyError as refusal:
        return f"refused: {refusal.problem.partition('forward does: ')[2].partition(' is ')[0]}"
    if not _is_near(expected, made):
        return "wrong outputs"
    return "right" if all(map(_is_near, gradients, others)) else "wrong gradients"


def _results(model: nn.Module, x: Tensor) -> list[Tensor]:
    outputs: Tensor = model(x)
    outputs.square().mean().backward()
    return [outputs.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def _is_near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= _NEAR * float(one.abs().max())
