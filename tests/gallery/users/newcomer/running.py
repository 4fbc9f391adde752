"""Running statistics, codebooks, caches: most are updated once more by recomputation, some stand it."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import collections
import functools

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


def batchnorm_in_every_block():
    def block():
        return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, momentum=None), nn.ReLU())

    return Stack(block() for _ in range(4)), (torch.randn(6, D),), mean_square


class RunningNorm(nn.Module):
    """Divides by running moments, not by those of the batch (as in reinforcement learning)."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("var", torch.ones(D))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.var.lerp_(x.var(0), 0.1)
        return torch.tanh(self.lin((x - self.mean) * self.var.rsqrt()))


def running_observation_norm():
    return Stack([Plain(), RunningNorm(), Plain()]), (torch.randn(6, D),), mean_square


class VectorQuantizer(nn.Module):
    """VQ-VAE with an exponential moving average of its codes."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("codes", torch.randn(5, D))

    def forward(self, x):
        z = self.lin(x)
        pick = torch.cdist(z, self.codes).argmin(-1)
        if self.training:
            onehot = F.one_hot(pick, 5).float().detach()
            mean = onehot.T @ z.detach() / onehot.sum(0).clamp(min=1)[:, None]
            self.codes = torch.where(onehot.sum(0)[:, None] > 0, 0.7 * self.codes + 0.3 * mean, self.codes)
        q = self.codes[pick]
        return z * torch.sigmoid(q) + (q - z).detach()


def ema_codebook():
    return Stack([Plain(), Plain(), VectorQuantizer()]), (torch.randn(9, D),), mean_square


class DelayedScaling(nn.Module):
    """FP8 recipe: the scale comes from the largest value of recent steps, not of this one."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("amax", torch.zeros(4))

    def forward(self, x):
        old = self.amax.max()
        scale = torch.where(old > 0, 8 / old, torch.ones(()))
        self.amax = torch.cat([x.detach().abs().max()[None], self.amax[:-1]])
        q = torch.round(x * scale) / scale
        return self.lin(x + (q - x).detach())


def fp8_delayed_scaling():
    return Stack([Plain(), DelayedScaling(), Plain(), Plain()]), (torch.randn(6, D),), mean_square


def spectral_norm_power_iteration():
    def block(spectral):
        lin = nn.Linear(D, D)
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(lin) if spectral else lin, nn.Tanh())

    return Stack([block(False), block(True), block(False)]), (torch.randn(6, D),), mean_square


class Histogram(nn.Module):
    """Reweights rows by how common they were, in a NumPy array."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.hist = np.full(4, 1.0)

    def forward(self, x):
        bins = np.clip(np.digitize(x.detach().mean(-1).numpy(), [-0.2, 0.0, 0.2]), 0, 3)
        np.add.at(self.hist, bins, 1.0)
        weight = torch.from_numpy((self.hist.sum() / self.hist)[bins]).to(x)
        return x + torch.tanh(self.lin(x) * weight[:, None])


def numpy_histogram():
    return Stack([Histogram(), Plain(), Plain()]), (torch.randn(9, D),), mean_square


class TransformerXl(nn.Module):
    """Adds what it saw in the call before."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.memory = None

    def forward(self, x):
        past = torch.zeros_like(x) if self.memory is None else self.memory
        self.memory = x.detach()
        return x + torch.tanh(self.lin(x + past))


def memory_of_last_segment():
    return Stack([Plain(), Plain(), TransformerXl(), Plain()]), (torch.randn(4, D),), mean_square


class Replay(nn.Module):
    """Keeps means of recent batches. They are read in the next step, by the model's head."""

    def __init__(self):
        super().__init__()
        self.recent = collections.deque(maxlen=4)
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        self.recent.append(float(x.detach().mean()))
        return x + torch.tanh(self.lin(x))


class ReplayModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plain(), Replay(), Plain()])

    def forward(self, x):
        baseline = sum(self.blocks[1].recent)
        for block in self.blocks:
            x = block(x)
        return x - baseline


def deque_read_by_next_step():
    return ReplayModel(), (torch.randn(4, D) + 0.5,), mean_square


class MomentumTeacher(nn.Module):
    """A teacher, frozen parameters, follows the student in forward; only evaluation asks it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(D, D)
        self.teacher = nn.Linear(D, D).requires_grad_(False)

    def forward(self, x):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.data.lerp_(s.data, 0.05)
        return x + torch.tanh((self.student if self.training else self.teacher)(x))


def teacher_parameters_follow_in_forward():
    return Stack([Plain(), MomentumTeacher(), Plain()]), (torch.randn(4, D),), mean_square


class Decay(nn.Module):
    """Weight decay by hand, where the weight is used."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / 3)

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.98)
        return torch.tanh(x @ self.weight)


def weight_decay_in_forward():
    return Stack([Plain(), Decay(), Plain()]), (torch.randn(4, D),), mean_square


# From here on recomputation does no harm.


class Clipped(nn.Module):
    """A critic's weights are clipped in forward: doing it twice is doing it once."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        with torch.no_grad():
            self.lin.weight.clamp_(-0.2, 0.2)
        return x + torch.tanh(self.lin(x))


def weight_clipping_in_forward():
    return Stack(Clipped() for _ in range(3)), (torch.randn(4, D),), mean_square


class RangeObserver(nn.Module):
    """The largest value so far: a maximum taken twice is the same maximum."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("largest", torch.zeros(()))
        self.history_max = 0.0

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        self.history_max = max(self.history_max, float(x.detach().max()))
        return self.lin(torch.fake_quantize_per_tensor_affine(x, float(self.largest) / 100, 0, -128, 127))


def running_maximum():
    return Stack(RangeObserver() for _ in range(3)), (torch.randn(4, D),), mean_square


class ActNorm(nn.Module):
    """The first batch sets shift and scale (Glow)."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(D))
        self.log_scale = nn.Parameter(torch.zeros(D))
        self.lin = nn.Linear(D, D)
        self.initialised = False

    def forward(self, x):
        if not self.initialised:
            self.shift.data.copy_(-x.detach().mean(0))
            self.log_scale.data.copy_(-x.detach().std(0).log())
            self.initialised = True
        return torch.tanh(self.lin((x + self.shift) * self.log_scale.exp()))


def data_dependent_initialisation():
    return Stack(ActNorm() for _ in range(3)), (torch.randn(6, D),), mean_square


@functools.lru_cache(maxsize=None)
def causal_mask(size):
    return torch.ones(size, size, dtype=torch.bool).tril()


class MaskedMix(nn.Module):
    """A mask remembered by size, for the whole program; rotary angles stored by the model in each forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        scores = (x @ x.transpose(1, 2)).masked_fill(~causal_mask(x.shape[1]), float("-inf"))
        return self.lin(scores.softmax(-1) @ (x * self.angles))


class RotaryModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.freq = nn.Parameter(torch.rand(D))
        self.blocks = nn.ModuleList(MaskedMix() for _ in range(3))

    def forward(self, x):
        angles = torch.cos(torch.arange(x.shape[1])[:, None] * self.freq)
        for block in self.blocks:
            block.angles = angles  # rebuilt in each forward, with a gradient
            x = block(x)
        return x


def caches_rebuilt_in_forward():
    return RotaryModel(), (torch.randn(2, 5, D),), mean_square
