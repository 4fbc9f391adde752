"""Random numbers: from torch's generator, and from others that checkpointing does not put back."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

D = 8


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(y):
    return y.square().mean()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(x))


class DropPath(nn.Module):
    """Stochastic depth: a branch in Python on a draw of torch, and dropout in attention."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.lin = nn.Linear(D, D)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        if self.training and torch.rand(()) < self.rate:
            return x
        return x + self.drop(F.gelu(self.lin(x))) * torch.empty(x.shape[0], 1).bernoulli_(0.8)


def stochastic_depth_with_torch():
    return Stack(DropPath(0.1 * i) for i in range(4)), (torch.randn(5, D),), mean_square


class NoisyRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        p = (self.gate(x) + torch.randn(x.shape[0], 3)).softmax(-1)
        pick = torch.multinomial(p, 1).squeeze(1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (pick == i).nonzero().squeeze(1)
            y = y.index_add(0, rows, expert(x[rows]) * p[rows, i, None])
        return x + y


def noisy_top1_experts():
    return Stack(NoisyRouter() for _ in range(3)), (torch.randn(6, D),), mean_square


class Variational(nn.Module):
    """The same mask in every step, by seeding inside of the block."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        torch.manual_seed(self.seed)
        return x + F.dropout(torch.tanh(self.lin(x)), 0.5)


def reseeds_inside_block():
    return Stack(Variational(7 + i) for i in range(3)), (torch.randn(4, D),), mean_square


class StochasticRounding(torch.autograd.Function):
    """Gradients get noise from torch's generator in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 1e-3 * torch.rand_like(grad)


class GradientNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + StochasticRounding.apply(F.dropout(self.lin(x), 0.1))


def draws_in_backward():
    return Stack(GradientNoise() for _ in range(3)), (torch.randn(4, D),), mean_square


class Frozen(nn.Module):
    """The pretrained half stays in eval mode whatever train() says."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
        blocks = [
            nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(), nn.Dropout(0.5)) for _ in range(2)
        ]
        self.blocks = nn.ModuleList([*blocks, Plain(), Plain()])
        self.train()

    def train(self, mode=True):
        super().train(mode)
        for block in self.blocks[:2]:
            block.eval().requires_grad_(False)
        return self

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def batchnorm_outside_and_eval_inside():
    return Frozen(), (torch.randn(6, D),), mean_square


# From here on the variant computes something else.


class Jitter(nn.Module):
    """Random gain for robustness, from Python's generator."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(x) * random.uniform(0.5, 1.5))


def python_random_gain():
    return Stack([Plain(), Jitter(), Plain()]), (torch.randn(4, D),), mean_square


class CutMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        order = torch.from_numpy(np.random.permutation(x.shape[0]))
        return x + torch.relu(self.lin(0.7 * x + 0.3 * x[order]))


def numpy_permutation():
    return Stack([Plain(), Plain(), CutMix()]), (torch.randn(7, D),), mean_square


class OwnDropout(nn.Module):
    """Dropout with a generator of its own, so that data order and dropout are seeded apart."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5)


def explicit_generator():
    return (
        Stack([Plain(), nn.Sequential(Plain(), OwnDropout(), Plain()), Plain()]),
        (torch.randn(4, D),),
        mean_square,
    )


class TokenShift(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.mix = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x):
        shifted = torch.roll(x, int(self.rng.integers(1, 1000)) % (x.shape[1] - 1) + 1, dims=1)
        return x + torch.sigmoid(self.mix) * shifted


def numpy_generator_shift():
    return Stack([TokenShift(), Plain(), Plain()]), (torch.randn(2, 101, D),), mean_square


class SampledLogging(nn.Module):
    """Looks at one activation in a thousand. Nothing that it computes depends on the draw."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        if random.random() < 0.001:
            print("norm", x.norm().item())
        return x + torch.tanh(self.lin(x))


def python_random_for_logging_only():
    return Stack([Plain(), SampledLogging(), Plain()]), (torch.randn(4, D),), mean_square
