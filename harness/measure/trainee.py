"""A model with what it takes to train it: all that the meters know of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.measure.work.compiled_graphs import CompiledGraphs


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

    def update(self) -> None:
        """Step the optimizer."""

    def zero_grad(self) -> None:
        """Drop the gradients."""
