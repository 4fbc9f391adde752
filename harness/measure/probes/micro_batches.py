"""Micro-batches of one step: one after the other, or all in flight at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.measure.probes.pass_error import told
from harness.measure.trainee import Trainee, Watcher, forward_and_backward
from harness.measure.work.compiled_graphs import CompiledGraphs
from harness.models.base import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatched:
    """A trainee that takes the micro-batches of a step, and says of which model and phase an error is.

    Fields:
        between: called between forward and backward; all micro-batches are then in flight at once. `None`:
            each is followed by its backward.
    """

    inner: Trainee
    is_variant: bool
    between: Callable[[Trainee], None] | None = None
    _in_flight: list[Tensor] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.inner.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        return self.inner.optimizer

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """FQN of each block to the block."""
        return self.inner.blocks

    @property
    def checkpointed(self) -> Mapping[str, nn.Module]:
        """FQN of each module that checkpointing recomputes to it."""
        return self.inner.checkpointed

    @property
    def compiled(self) -> CompiledGraphs | None:
        """The graphs that a compiler made of the model; `None` where nothing is compiled."""
        return self.inner.compiled

    def interrupted(self, between: Callable[[Trainee], None]) -> MicroBatched:
        """Return the same with all micro-batches in flight, and `between` between forward and backward."""
        return dataclasses.replace(self, between=between)

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return what the model returns, a list of it for several micro-batches, and the sum of the losses.

        Where outputs are never whole, they are `None`, whatever the number of micro-batches.

        Args:
            batch: what `joined` made.

        Raises:
            PassError: the model or its loss raised.
            ConfigError: they say what the caller has to change.
        """
        outputs: list[Any] = []
        losses: list[Tensor] = []
        self._in_flight.clear()
        for part in batch.parts():
            if self._in_flight and self.between is None:
                self._backward(self._in_flight.pop())
                losses[-1] = losses[-1].detach()
            with told("forward", is_variant=self.is_variant):
                output, loss = self.inner.forward(part)
            outputs.append(output)
            losses.append(loss)
            self._in_flight.append(loss)
        if len(outputs) == 1:
            return outputs[0], losses[0]
        are_whole = any(each is not None for each in outputs)
        return outputs if are_whole else None, torch.stack([loss.reshape(()) for loss in losses]).sum()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of what is in flight, first come first served.

        Args:
            loss: what `forward` returned; the losses that it sums are known.

        Raises:
            PassError: backward raised.
        """
        del loss
        if self.between is not None:
            with told("forward", is_variant=self.is_variant):
                self.between(self.inner)
        while self._in_flight:
            self._backward(self._in_flight.pop(0))

    def step(self, batch: Batch, watcher: Watcher) -> None:
        """Run forward and backward of all micro-batches; `watcher` sees them as one."""
        forward_and_backward(self, batch, watcher)

    def update(self) -> None:
        """Take one optimizer step. Raises PassError: the optimizer raised."""
        with told("update", is_variant=self.is_variant):
            self.inner.update()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.inner.zero_grad()

    def _backward(self, loss: Tensor) -> None:
        with told("backward", is_variant=self.is_variant):
            self.inner.backward(loss)
