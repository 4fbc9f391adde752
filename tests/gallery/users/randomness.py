"""Random numbers: from torch's generator, and from others that checkpointing does not put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.gallery.parts import WIDTH, Chain, Example, Layer, Net, example, linear, three


class Dropping(Layer):
    """Dropout, right under a checkpoint that keeps the random state."""

    def change(self, h: Tensor) -> Any:
        return functional.dropout(h, 0.5, self.training)


class Jittering(Layer):
    """Noise of torch's generator on each row."""

    def change(self, h: Tensor) -> Any:
        return h * (1 + torch.randn(len(h), 1))


class DropPath(Layer):
    """Drops rows by torch's generator, with a rate that is an attribute."""

    drop_prob = 0.3

    def change(self, h: Tensor) -> Any:
        if not self.training:
            return h
        return h * (torch.rand(len(h), 1) > self.drop_prob) / (1 - self.drop_prob)


class StochasticDepth(Layer):
    """Branches in Python on a draw of torch's generator, whose state is put back for recomputation."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.rate, self.drop = rate, nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        if self.training and torch.rand(()) < self.rate:
            return x
        return x + self.drop(functional.gelu(self.linear(x))) * torch.empty(len(x), 1).bernoulli_(0.8)


def stochastic_depth() -> Example:
    """Four blocks are left out ever more often."""
    return example(Chain(*(StochasticDepth(0.1 * place) for place in range(4))), torch.randn(5, WIDTH))


class NoisyExperts(nn.Module):
    """A router draws noise and experts from torch's generator, and rows go where that says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(linear() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        p = (self.gate(x) + torch.randn(len(x), 3)).softmax(-1)
        pick = torch.multinomial(p, 1).squeeze(1)
        y = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = (pick == place).nonzero().squeeze(1)
            y = y.index_add(0, rows, expert(x[rows]) * p[rows, place, None])
        return x + y


class SeedsItself(Layer):
    """Seeds torch's generator in each call, for one mask in all steps; recomputation runs in a fork of it."""

    def change(self, h: Tensor) -> Any:
        torch.manual_seed(7)
        return functional.dropout(h, 0.5)


class NoiseInBackward(torch.autograd.Function):
    """Gradients get noise from torch's generator."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient + 1e-3 * torch.rand_like(gradient)


class DrawsInBackward(Layer):
    """Backward draws from torch's generator, and recomputation in between leaves it where it was."""

    def change(self, h: Tensor) -> Any:
        return NoiseInBackward.apply(functional.dropout(h, 0.1))


def draws_in_every_backward() -> Example:
    """Three blocks draw in backward."""
    return three(DrawsInBackward)


class RandomGain(Layer):
    """Draws a gain from Python's generator, which checkpointing does not put back."""

    def change(self, h: Tensor) -> Any:
        return h * random.uniform(0.5, 1.5)


class CutMix(Layer):
    """Draws a permutation from NumPy's global generator, so recomputation mixes other rows."""

    def forward(self, x: Tensor) -> Any:
        drawn = np.random.permutation(len(x))  # noqa: NPY002 (users draw from it)
        order = torch.from_numpy(drawn)
        return super().forward(0.7 * x + 0.3 * x[order])


class OwnGenerator(Layer):
    """Draws a mask from a generator of its own: recomputation draws the next mask."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def change(self, h: Tensor) -> Any:
        return h * (torch.rand(h.shape, generator=self.generator) > 0.5)


class NumpyGenerator(Layer):
    """A generator of NumPy that the block owns decides a shift; recomputation shifts by another number."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(
            x.roll(int(self.rng.integers(1, 1000)) % 7 + 1, dims=1) * float(self.rng.random())
        )


class PythonGenerator(Layer):
    """A `random.Random` of its own decides the order of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(linear() for _ in range(3))
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Any:
        for place in self.random.sample(range(3), 3):
            x = self.parts[place](x).tanh()
        return x


class SampledLogging(Layer):
    """A draw decides only whether to log: gradients are right, Python's generator is elsewhere afterwards."""

    logged = 0

    def change(self, h: Tensor) -> Any:
        if random.random() < 0.001:
            self.logged += 1
        return h


class DrawsFromArgument(Layer):
    """Draws from a generator that it is given."""

    def forward(self, x: Tensor, generator: torch.Generator) -> Any:  # type: ignore[override]  # it takes more
        return x + self.linear(x * torch.rand(x.shape, generator=generator)).tanh()


class GeneratorAsArgument(Net):
    """The model makes a generator in each forward and hands it to its blocks."""

    def __init__(self) -> None:
        super().__init__(DrawsFromArgument(), DrawsFromArgument())

    def run(self, x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(7)
        for block in self.blocks:
            x = block(x, generator)
        return x


class SharesGenerator(Layer):
    """Draws from a generator that it shares."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def change(self, h: Tensor) -> Any:
        return h * torch.rand(h.shape, generator=self.generator)


class SeedsInForward(Net):
    """The model seeds the generator of its blocks in each forward."""

    def __init__(self) -> None:
        generator = torch.Generator()
        super().__init__(SharesGenerator(generator), SharesGenerator(generator))

    def run(self, x: Tensor) -> Any:
        self.blocks[0].generator.manual_seed(1)
        return super().run(x)


# Right: drawn outside of blocks, or once.


class ShuffledOnce(Net):
    """The order of the blocks was drawn when the model was made."""

    def __init__(self) -> None:
        super().__init__(Layer(), Layer(), Layer())
        self.order = random.Random(3).sample(range(3), 3)

    def run(self, x: Tensor) -> Any:
        for place in self.order:
            x = self.blocks[place](x)
        return x


class Augments(Net):
    """A generator of the model is drawn from before the blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def run(self, x: Tensor) -> Any:
        return super().run(x + torch.randn(x.shape, generator=self.generator))


class Gained(Layer):
    """Scales by what it is given."""

    def forward(self, x: Tensor, gain: Any) -> Any:  # type: ignore[override]  # it takes more
        return x + (self.linear(x) * gain).sin()


class DrawsOutside(Net):
    """Python's generator gives each block its gain as an argument."""

    def __init__(self) -> None:
        super().__init__(Gained(), Gained())

    def run(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x, random.uniform(0.5, 1.5))
        return x


class FixedNoise(Layer):
    """A router adds noise that was drawn once."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3)
        self.register_buffer("noise", torch.randn(4))

    def change(self, h: Tensor) -> Any:
        weight, chosen = (self.router(h) + self.noise).softmax(-1).max(-1)
        return torch.einsum("bi,bij->bj", h, self.experts[chosen]) * weight[:, None]
