"""True if what a model computes depends on what it reads: equal results of a dead model prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.measure.parity.checksum import checksum
from harness.models.base import Batch
from strategies.estimate.tensors import tensors_held_by

_FACTOR, _OFFSET = 0.75, 0.5


def ignores_input(forward: Callable[[Batch], tuple[Any, Tensor]], batch: Callable[[], Batch]) -> bool:
    """Say whether neither outputs nor loss change where every input does.

    Args:
        forward: a model's forward, under the same random numbers at each call; returns outputs and loss.
        batch: returns a new copy of the batch at each call.
    """
    changed = batch().changed(_another)
    has_changed = any(
        not torch.equal(one, other)
        for one, other in zip(tensors_held_by(batch()), tensors_held_by(changed), strict=True)
    )
    return has_changed and _sums(forward(batch())) == _sums(forward(changed))


def _another(tensor: Tensor) -> Tensor:
    """Return other numbers; of integers the same ones at other places, which stay in their range."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.flatten().roll(1).reshape(tensor.shape) if tensor.numel() else tensor
    return (tensor.detach() * _FACTOR + _OFFSET).requires_grad_(tensor.requires_grad)


def _sums(results: tuple[Any, Tensor]) -> list[int]:
    return [checksum(each) for each in tensors_held_by(results)]
