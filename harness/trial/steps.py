"""The steps that a model takes before the instrumented one, with data and without."""

from __future__ import annotations

from collections.abc import Callable

from harness.measure.parity.snapshot import require_comparable
from harness.measure.trainee import Trainee
from harness.models.base import Batch

UNMEASURED_STEPS = 2
"""The first makes the lazy state of optimizer and FSDP, the second puts DDP's buckets in their order."""


def train(trainee: Trainee, batch: Batch, *, is_compared: bool = False) -> None:
    """Train by one step: forget gradients, forward, backward, update.

    Raises:
        ConfigError: the outputs are to be compared later, and cannot be.
    """
    trainee.zero_grad()
    outputs, loss = trainee.forward(batch)
    if is_compared:
        require_comparable(outputs)
    trainee.backward(loss)
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
        trainee: a fresh model.
        batch: returns a rank's share of a step's batch.
        steps: how many.
        is_compared: the outputs are to be compared later.
    """
    for step in range(steps):
        train(trainee, batch(step), is_compared=is_compared)
