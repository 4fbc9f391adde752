"""Nothing can be verified: the plain model does not repeat itself, or trains nothing."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    Net,
    around,
    example,
    linear,
)


class TimeEmbedding(Layer):
    """The time of day is an input, so the plain model differs from itself."""

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(x * (1 + time.time() % 1)))


class SecureNoise(Layer):
    def forward(self, x: Any) -> Any:
        noise = torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8).view_as(x)
        return x + torch.tanh(self.linear(x + noise / 2560))


def operating_system_noise() -> Example:
    """Noise comes from os.urandom, which no seed repeats."""
    return example(Chain(Layer(), Layer(), SecureNoise()), torch.randn(4, WIDTH))


class Committee(nn.Module):
    """Experts in a set: their order follows their addresses, and they do not commute."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(linear() for _ in range(7))
        self.pending = set(self.members)

    def forward(self, x: Any) -> Any:
        for member in self.pending:
            x = torch.tanh(member(x)) * 1.5
        return x


def set_of_modules() -> Example:
    """Modules that do not commute are in a set, in the order of their addresses: the same model built
    twice differs."""
    return example(Chain(*(Committee() for _ in range(4))))


class Parallel(nn.Module):
    """Results of threads are added as they come, in no order that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(linear() for _ in range(5))

    def forward(self, x: Any) -> Any:
        def work(expert: Any) -> Any:
            time.sleep(os.urandom(1)[0] / 256 * 0.004)
            return torch.tanh(expert(x))

        with ThreadPoolExecutor(5) as pool:
            for done in as_completed([pool.submit(work, e) for e in self.experts]):
                x = 0.5 * x + done.result()
        return x


class AddressSeed(Layer):
    """Each layer seeds a generator with its id, so two builds from one seed differ, while recomputation
    would be right."""

    def forward(self, x: Any) -> Any:
        g = torch.Generator().manual_seed(id(self))
        return x + torch.tanh(self.linear(x)) * (torch.rand(x.shape, generator=g) > 0.2)


class Binariser(Chain):
    def forward(self, x: Any) -> Any:
        return torch.round(super().forward(x))  # no straight-through estimator: nothing learns


def all_gradients_zero() -> Example:
    """The model ends in round(), so all gradients are zero on both sides, and equal zeros prove nothing."""
    return example(Binariser(*(Layer() for _ in range(3))), torch.randn(4, WIDTH))


class Standardised(Chain):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)[:, :1]
        y = y - y.mean(-1, keepdim=True)  # over the wrong dimension: it has one element
        return y / (y.square().mean(-1, keepdim=True).sqrt() + 1e-5)  # the root of 0 has an infinite slope


def all_gradients_nan() -> Example:
    """A deviation is taken over a dimension of size one, and the root of its zero has an infinite slope,
    so gradients are NaN on both sides, and equal NaNs prove nothing."""
    return example(Standardised(*(Layer() for _ in range(3))), torch.randn(4, WIDTH))


_MADE = itertools.count()


class Salted(Layer):
    """Weights from the system's entropy."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.weight.add_(int.from_bytes(os.urandom(2), "big") / 65536)


class Numbered(Layer):
    """Each instance scales by how many were made before it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_MADE)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * (1 + self.number))


class Infinite(Layer):
    """The logarithm of negative numbers."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).log()


class CheckpointedHead(Net):
    """A user's own checkpoint around the head: recomputation that no variant did."""

    def forward(self, x: Tensor) -> Any:
        x = self.run(self.stem(x))
        outputs: Tensor = checkpoint(lambda inputs: self.head(inputs.sin()).tanh(), x, use_reentrant=False)
        return outputs


def zero_head() -> Example:
    """The head starts as zero: no block gets a gradient in the first step."""
    model = Net()
    nn.init.zeros_(model.head.weight)
    model.head.weight.requires_grad_(False)
    return example(model)


def detached() -> Example:
    """The loss cannot reach the blocks."""
    model, inputs, _ = around(Layer)
    return model, inputs, lambda outputs: (outputs * 0).sum()


def checkpointed_head() -> Example:
    """The model recomputes its head by itself."""
    return example(CheckpointedHead())


def no_module() -> Example:
    """A function stands where a module should be."""
    model, inputs, loss = around(Layer)
    return model.forward, inputs, loss  # type: ignore[return-value]  # what users forget
