"""Directional finite differences in float64: an oracle for gradients that knows no twin.

The slope of the loss along one random direction of all parameters is g·v by the gradients g, and
(L(p + hv) - L(p - hv)) / 2h by the loss alone. Two lengths h must agree before that counts: at a kink, and
where random numbers or time come in, they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.measure.rng import seeded
from harness.measure.trainee import Trainee
from harness.models.base import Batch
from strategies.estimate.tensors import tensors_held_by

_LENGTHS = (1e-4, 3e-5)
_TOLERANCE = 1e-4
"""Accepted distance of two slopes, as a share of the larger one and of the whole gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The slope of the loss along one direction of unit length.

    Fields:
        by_gradients: g·v.
        by_loss: the same by differences of the loss, of the shorter length.
        steepest: length of the gradient, which no slope exceeds.
        unclear: why the differences say nothing; empty where they do.
    """

    by_gradients: float
    by_loss: float
    steepest: float
    unclear: str = ""

    @property
    def agrees(self) -> bool:
        """True if the gradients are those of the loss, as far as the differences say."""
        return bool(self.unclear) or _are_close(self.by_gradients, self.by_loss, self.steepest)


def slope(
    trainee: Callable[[], Trainee], batch: Callable[[], Batch], *, seed: int, device: torch.device
) -> Slope:
    """Return the slope of the loss of a model by its gradients and by differences, in float64.

    Of a loss that is computed in fewer digits, a weighted sum of the outputs takes the place.

    Args:
        trainee: returns a fresh model at each call, of the same weights.
        batch: returns a new copy of the batch at each call.
        seed: seed of the direction and of what each forward draws.
    """

    def loss_at(length: float) -> tuple[Tensor, list[Tensor], Trainee]:
        """Return the loss with parameters moved by `length`, in float64; at 0 also their gradients."""
        made = trainee()
        made.model.double()
        parameters: list[Tensor] = [each for each in made.model.parameters() if each.requires_grad]
        with torch.no_grad():
            for parameter, along in zip(parameters, _direction(parameters, seed), strict=True):
                parameter.add_(along, alpha=length)
        with seeded(seed, step=0, dp_rank=0, device=device):
            loss = _in_float64(*made.forward(batch().changed(_doubled)))
            if not length:
                made.backward(loss)
        return loss.detach(), parameters, made

    loss, parameters, _ = loss_at(0.0)
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in parameters]
    along = _direction(parameters, seed)
    by_gradients = sum(float((one * other).sum()) for one, other in zip(gradients, along, strict=True))
    steepest = float(torch.stack([each.norm() for each in gradients]).norm())
    longer, shorter = (float(loss_at(length)[0] - loss_at(-length)[0]) / (2 * length) for length in _LENGTHS)
    unclear = ""
    if loss.dtype is not torch.float64:
        unclear = f"the model is float64, and neither its loss nor an output is: {loss.dtype}"
    elif not _are_close(longer, shorter, steepest):
        unclear = f"differences of the loss do not agree, {longer:.6g} and {shorter:.6g}: a kink, or noise"
    return Slope(by_gradients=by_gradients, by_loss=shorter, steepest=steepest, unclear=unclear)


def _in_float64(outputs: Any, loss: Tensor) -> Tensor:
    """Return the loss; where it is of fewer digits, a weighted sum of the outputs that are not."""
    whole = [each for each in tensors_held_by(outputs) if each.dtype is torch.float64 and each.requires_grad]
    if loss.dtype is torch.float64 or not whole:
        return loss
    weights = (torch.arange(each.numel(), device=each.device).reshape(each.shape).cos() for each in whole)
    return torch.stack([(each * weight).mean() for each, weight in zip(whole, weights, strict=True)]).sum()


def _direction(parameters: list[Tensor], seed: int) -> list[Tensor]:
    """Return one tensor for each parameter; all together have length 1."""
    random = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(each.shape, generator=random, dtype=torch.float64).to(each.device) for each in parameters
    ]
    length = torch.stack([each.norm() for each in drawn]).norm()
    return [each / length for each in drawn]


def _doubled(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().double().requires_grad_(tensor.requires_grad)
        if tensor.is_floating_point()
        else tensor
    )


def _are_close(one: float, other: float, steepest: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-2 * steepest)  # false of NaN
