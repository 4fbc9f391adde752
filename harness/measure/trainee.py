"""A model with what it takes to train it: all that the meters know of a trial.

A step is whatever `Trainee.step` runs: one forward and one backward, those of several micro-batches in turn,
or a schedule. It tells a `Watcher` of its moments, and the meters are watchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from harness.measure.work.compiled_graphs import CompiledGraphs
from strategies.step.position import Phase

BackwardPart = Literal["input", "weight"]
"""A backward, or its part for the gradient of the input; and its part for the gradients of weights."""


class Watcher:
    """One that is told of the moments of a step as they come; this one makes nothing of them."""

    def on_dropped(self) -> None:
        """Note that the gradients of the step before have been dropped."""

    def on_action(self, action: str) -> None:
        """Note that an action of a schedule begins, whose forward or backward is the next: `2I3`."""

    def enter(self, phase: Phase, part: BackwardPart = "input") -> None:
        """From now on the step does this, until it enters another phase; `part` says more of a backward."""

    def on_forward(self, outputs: Any, loss: Tensor | None) -> None:
        """Take what the forward of a micro-batch returns, before its backward.

        Args:
            outputs: those of the model, `None` where they are never whole; of a stage that is not the last of
                its pipeline what the next one takes.
            loss: what backward starts from: the micro-batch's part of the mean over all of them; `None` of a
                stage that is not the last.
        """

    def on_backward(self) -> None:
        """Note that the backward of a micro-batch has returned."""


class Trainee(Protocol):
    """A model, its optimizer, and the parts of a training step."""

    @property
    def model(self) -> nn.Module:
        """The module as it is called, wrappers included."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """FQN of each block to the block of `model` itself."""

    @property
    def checkpointed(self) -> Mapping[str, nn.Module]:
        """FQN of each module that checkpointing recomputes to it; the blocks where it names none."""

    @property
    def compiled(self) -> CompiledGraphs | None:
        """The graphs that a compiler made of the model; `None` where nothing is compiled."""

    def forward(self, batch: Any) -> tuple[Any, Tensor]:
        """Return the outputs of the model, `None` where they are never whole, and the scalar loss."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`."""

    def step(self, batch: Any, watcher: Watcher) -> None:
        """Accumulate the gradients of a batch, by as many forwards and backwards as it takes."""

    def update(self) -> None:
        """Step the optimizer."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


def forward_and_backward(trainee: Trainee, batch: Any, watcher: Watcher, *, microbatches: int = 1) -> None:
    """Run forward and backward of one micro-batch; like a careful training loop, drop the outputs in between.

    Args:
        microbatches: how many the step has. Each has as many samples as the others, so that the mean loss of
            the whole batch is the mean of theirs.
    """
    watcher.enter("forward")
    outputs, loss = trainee.forward(batch)
    if microbatches > 1:
        loss = loss / microbatches
    watcher.on_forward(outputs, loss)
    del outputs
    watcher.enter("backward")
    trainee.backward(loss)
    watcher.on_backward()
