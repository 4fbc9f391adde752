"""Models about which nothing can be proven, or that cannot be run: each needs a sentence and no blame."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.users.authors.stacks import Example, Plain, Stack, around, example

_MADE = itertools.count()


class Timed(Plain):
    """Adds the time of day."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x + (time.perf_counter() % 1))


class Salted(Plain):
    """Weights from the system's entropy."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.weight.add_(int.from_bytes(os.urandom(2), "big") / 65536)


class Numbered(Plain):
    """Each instance scales by how many were made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_MADE)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x * (1 + self.number))


class Infinite(Plain):
    """The logarithm of negative numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, NaN in part."""
        return super().forward(x).log()


class Raising(Plain):
    """A bug of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        """Raise an AttributeError."""
        return super().forward(x) + self.missing  # type: ignore[operator]


class CheckpointedHead(Stack):
    """A user's own checkpoint around the head: recomputation that no variant did."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = checkpoint(lambda inputs: self.head(inputs.sin()).tanh(), x, use_reentrant=False)
        return outputs


timed = partial(around, Timed)
salted = partial(around, Salted)
numbered = partial(around, Numbered)
infinite = partial(around, Infinite)
raising = partial(around, Raising)


def zero_head() -> Example:
    """Return a stack whose head starts as zero: no block gets a gradient in the first step."""
    made = around(Plain)
    nn.init.zeros_(made[0].head.weight)
    made[0].head.weight.requires_grad_(requires_grad=False)
    return made


def detached() -> Example:
    """Return a stack whose blocks the loss cannot reach."""
    model, inputs, _ = around(Plain)
    return model, inputs, lambda outputs: (outputs * 0).sum()


def checkpointed_head() -> Example:
    """Return a stack that recomputes its head by itself."""
    return example(CheckpointedHead([Plain() for _ in range(3)]))


def vector_loss() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    """Return a loss that is a vector."""
    model, inputs, _ = around(Plain)
    return model, inputs, lambda outputs: outputs.square().mean(1)


def no_module() -> Example:
    """Return a function where a module should be."""
    model, inputs, loss = around(Plain)
    return model.forward, inputs, loss  # type: ignore[return-value]  # what users forget
