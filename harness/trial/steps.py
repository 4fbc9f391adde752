"""The steps that a model takes before the instrumented one, with data and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from harness.measure.parity.snapshot import require_comparable
from harness.measure.trainee import Trainee, Watcher
from harness.models.base import Batch

UNMEASURED_STEPS = 2
"""The first makes the lazy state of optimizer and FSDP, the second puts DDP's buckets in their order."""


def train(trainee: Trainee, batch: Batch, *, is_compared: bool = False) -> None:
    """Train by one step: forget gradients, forward and backward of every micro-batch, update.

    Raises:
        ConfigError: the outputs are to be compared later, and cannot be.
    """
    trainee.zero_grad()
    trainee.step(batch, _Compared() if is_compared else Watcher())
    trainee.update()


def warm_up(
    trainee: Trainee,
    batch: Callable[[int], Batch],
    *,
    steps: int = UNMEASURED_STEPS,
    is_compared: bool = False,
) -> None:
    """Train by the steps that nobody watches, so that the next one is like all that follow.

    Args:
        batch: returns a rank's share of a step's batch.
        is_compared: the outputs are to be compared later.
    """
    for step in range(steps):
        train(trainee, batch(step), is_compared=is_compared)


class _Compared(Watcher):
    """Refuses outputs that cannot be compared."""

    def on_forward(self, outputs: Any, loss: Tensor | None) -> None:  # noqa: ARG002 (a scalar always can)
        require_comparable(outputs)
