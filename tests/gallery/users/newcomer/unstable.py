"""Nothing can be verified: the plain model does not repeat itself, or trains nothing."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import torch.nn as nn

D = 8


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(x))


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


class TimeEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return x + torch.tanh(self.lin(x * (1 + time.time() % 1)))


def wall_clock_feature():
    return Stack([Plain(), TimeEmbedding(), Plain()]), (torch.randn(4, D),), mean_square


class SecureNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        noise = torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8).view_as(x)
        return x + torch.tanh(self.lin(x + noise / 2560))


def operating_system_noise():
    return Stack([Plain(), Plain(), SecureNoise()]), (torch.randn(4, D),), mean_square


class Committee(nn.Module):
    """Experts in a set: their order follows their addresses, and they do not commute."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(D, D) for _ in range(7))
        self.pending = set(self.members)

    def forward(self, x):
        for member in self.pending:
            x = torch.tanh(member(x)) * 1.5
        return x


def set_of_modules():
    return Stack(Committee() for _ in range(4)), (torch.randn(4, D),), mean_square


class Parallel(nn.Module):
    """Whichever worker ends first goes first."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x):
        def work(expert):
            time.sleep(os.urandom(1)[0] / 256 * 0.004)
            return torch.tanh(expert(x))

        with ThreadPoolExecutor(5) as pool:
            for done in as_completed([pool.submit(work, e) for e in self.experts]):
                x = 0.5 * x + done.result()
        return x


def threads_in_random_order():
    return Stack(Parallel() for _ in range(3)), (torch.randn(4, D),), mean_square


class AddressSeed(nn.Module):
    """A seed for each layer from its id, 'unique and free'."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        g = torch.Generator().manual_seed(id(self))
        return x + torch.tanh(self.lin(x)) * (torch.rand(x.shape, generator=g) > 0.2)


def seed_from_id():
    return Stack(AddressSeed() for _ in range(3)), (torch.randn(4, D),), mean_square


class Binariser(Stack):
    def forward(self, x):
        return torch.round(super().forward(x))  # no straight-through estimator: nothing learns


def all_gradients_zero():
    return Binariser(Plain() for _ in range(3)), (torch.randn(4, D),), mean_square


class Standardised(Stack):
    def forward(self, x):
        y = super().forward(x)[:, :1]
        y = y - y.mean(-1, keepdim=True)  # over the wrong dimension: it has one element
        return y / (y.square().mean(-1, keepdim=True).sqrt() + 1e-5)  # the root of 0 has an infinite slope


def all_gradients_nan():
    return Standardised(Plain() for _ in range(3)), (torch.randn(4, D),), mean_square
