"""Running statistics, codebooks, caches: most are updated once more by a recomputation, some stand it."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from tests.gallery.parts import WIDTH, Chain, Example, Layer, Net, example, linear, three

_TABLES: dict[int, Tensor] = {}


class BatchNorm(Layer):
    """Batch statistics are updated once more in recomputation; gradients use the batch's and are right."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def change(self, h: Tensor) -> Any:
        return self.norm(h)


def batch_norm_in_every_block() -> Example:
    """Batch normalisation in four blocks, of which a variant covers some."""
    return example(Net(*(BatchNorm() for _ in range(4))))


class RunningNorm(Layer):
    """Normalises by running moments that it has just updated, so recomputation normalises by others."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.var.lerp_(x.var(0), 0.1)
        return super().forward((x - self.mean) * self.var.rsqrt())


class RunningScale(Layer):
    """Divides by a running scale, which is a float."""

    scale = 1.0

    def change(self, h: Tensor) -> Any:
        self.scale = 0.9 * self.scale + 0.1 * float(h.detach().abs().mean())
        return h / self.scale


class Whitened(Layer):
    """A running mean in a plain tensor, which is bound anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def change(self, h: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return (h - self.mean) * self.mean.exp()


class Codebook(Layer):
    """Codes move in forward before they are read; recomputation moves them again."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def change(self, h: Tensor) -> Any:
        pick = torch.cdist(h, self.codes).argmin(-1)
        chosen = functional.one_hot(pick, 5).float().detach()
        mean = chosen.T @ h.detach() / chosen.sum(0).clamp(min=1)[:, None]
        self.codes = torch.where(chosen.sum(0)[:, None] > 0, 0.7 * self.codes + 0.3 * mean, self.codes)
        code = self.codes[pick]
        return h * torch.sigmoid(code) + (code - h).detach()


class DelayedScaling(Layer):
    """Scales by a history of maxima that each forward shifts, as FP8 recipes do."""

    amax: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        old = self.amax.max()
        scale = torch.where(old > 0, 8 / old, torch.ones(()))
        self.amax = torch.cat([x.detach().abs().max()[None], self.amax[:-1]])
        rounded = torch.round(x * scale) / scale
        return super().forward(x + (rounded - x).detach())


class Spectral(Layer):
    """Spectral normalisation takes a power iteration in each forward: another norm, other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(self.linear)


class Balanced(nn.Module):
    """A router without auxiliary loss adds to its bias in place, in forward."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.5)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(1).indices.flatten()
        load = torch.bincount(chosen, minlength=4)
        self.bias.add_(10.0 * (load.float().mean() - load).sign())
        return torch.bmm(x.unsqueeze(1), self.experts[chosen]).squeeze(1) * scores.gather(1, chosen[:, None])


class Histogram(Layer):
    """A NumPy array counts bins and weights rows; recomputation counts them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = np.full(4, 1.0)

    def forward(self, x: Tensor) -> Any:
        bins = np.clip(np.digitize(x.detach().mean(-1).numpy(), [-0.2, 0.0, 0.2]), 0, 3)
        np.add.at(self.counts, bins, 1.0)
        weight = torch.from_numpy((self.counts.sum() / self.counts)[bins]).to(x)
        return super().forward(x * weight[:, None])


class Remembering(Layer):
    """Adds its last input; in recomputation its last input is this one."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        past = torch.zeros_like(x) if self.last is None else self.last
        self.last = x.detach()
        return super().forward(x + past)


class Growing(Layer):
    """Appends a norm to a list at each call and scales by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.window: list[float] = []

    def change(self, h: Tensor) -> Any:
        self.window.append(float(h.detach().abs().mean()))
        return h * len(self.window)


class Logging(Layer):
    """Appends a statistic to a list at each call; nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def change(self, h: Tensor) -> Any:
        self.means.append(float(h.detach().mean()))
        return h


class LoggingHook(Layer):
    """A hook appends norms to a list that it encloses."""

    def __init__(self) -> None:
        super().__init__()
        norms: list[float] = []
        self.linear.register_forward_hook(lambda _m, _a, out: norms.append(float(out.detach().norm())))


class Losing(Layer):
    """Appends a loss to a list that all blocks share."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.losses = losses

    def change(self, h: Tensor) -> Any:
        self.losses.append(h.square().mean().detach())
        return h


class SharedLosses(Net):
    """The model clears a list when a forward begins; recomputation fills it once more."""

    def __init__(self) -> None:
        losses: list[Tensor] = []
        super().__init__(Losing(losses), Losing(losses))
        self.losses = losses

    def run(self, x: Tensor) -> Any:
        self.losses.clear()
        return super().run(x)


class Recent(Layer):
    """Divides by the mean of a deque of norms, then appends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.history = collections.deque([1.0], maxlen=4)

    def change(self, h: Tensor) -> Any:
        h = h / (sum(self.history) / len(self.history))
        self.history.append(float(h.detach().norm()))
        return h


class KeepsMeans(Layer):
    """Keeps means of recent batches in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[float] = collections.deque(maxlen=4)

    def change(self, h: Tensor) -> Any:
        self.recent.append(float(h.detach().mean()))
        return h


class DequeReadByNextStep(Net):
    """A deque gets the mean of each batch and the next step reads it; recomputation appends it twice."""

    middle = KeepsMeans

    def run(self, x: Tensor) -> Any:
        baseline = sum(self.blocks[1].recent)
        return super().run(x) - baseline


class LengthOfALog(Net):
    """A block scales by the length of a log to which the model appends when its blocks have run."""

    def __init__(self) -> None:
        super().__init__(Layer(), ReadsLog(), Layer())

    def run(self, x: Tensor) -> Any:
        x = super().run(x)
        self.blocks[1].log.append("step")
        return x


class ReadsLog(Layer):
    """Scales by the length of its log."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def change(self, h: Tensor) -> Any:
        return h * (1 + len(self.log))


class Teacher(Layer):
    """Frozen parameters of a teacher follow the student in forward, twice under recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(requires_grad=False)

    def change(self, h: Tensor) -> Any:
        for mine, other in zip(self.teacher.parameters(), self.linear.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.05)
        return h if self.training else self.teacher(h)


class Decaying(Layer):
    """Shrinks its weight in forward, and recomputation shrinks it again before it computes with it."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.linear.weight.mul_(0.98)
        return super().forward(x)


class DecayingByData(Layer):
    """The same through `.data`, which no version counter sees."""

    def forward(self, x: Tensor) -> Any:
        self.linear.weight.data.mul_(0.9)
        return super().forward(x)


# Right: a second update does no harm, or none takes place.


class Clipped(Layer):
    """Weights are clipped in forward; clipping twice is clipping once."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class RunningMaximum(Layer):
    """Keeps a maximum in a buffer and an attribute; taking it twice gives the same maximum."""

    largest: Tensor
    history_max = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        self.history_max = max(self.history_max, float(x.detach().max()))
        scale = float(self.largest) / 100
        return super().forward(torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127))


def running_maximum_in_every_block() -> Example:
    """The same in three blocks."""
    return three(RunningMaximum)


class ActNorm(Layer):
    """The first batch sets parameters before they are read; recomputation finds the flag and the values."""

    is_initialised = False

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        if not self.is_initialised:
            self.shift.data.copy_(-x.detach().mean(0))
            self.log_scale.data.copy_(-x.detach().std(0).log())
            self.is_initialised = True
        return super().forward((x + self.shift) * self.log_scale.exp())


@functools.cache
def _causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


class Mixing(Layer):
    """Mixes rows under a mask remembered by its size, with angles that its model stores."""

    angles: Any = None

    def forward(self, x: Tensor) -> Any:
        scores = (x @ x.transpose(1, 2)).masked_fill(~_causal(x.shape[1]), float("-inf"))
        return self.linear(scores.softmax(-1) @ (x * self.angles))


class RebuiltInForward(Chain):
    """Angles are set on the blocks in each forward, with a gradient: they are the same when backward asks."""

    def __init__(self) -> None:
        super().__init__(*(Mixing() for _ in range(3)))
        self.frequency = nn.Parameter(torch.rand(WIDTH))

    def run(self, x: Tensor) -> Any:
        angles = torch.cos(torch.arange(x.shape[1])[:, None] * self.frequency)
        for block in self.blocks:
            block.angles = angles
        return super().run(x)


def caches_rebuilt_in_forward() -> Example:
    """Rotary angles on the blocks, and a mask in an `lru_cache`."""
    return example(RebuiltInForward(), torch.randn(2, 5, WIDTH))


class LastNorm(Layer):
    """Logs the last norm in an attribute."""

    last = 0.0

    def change(self, h: Tensor) -> Any:
        self.last = float(h.detach().norm())
        return h


class TableInAGlobal(Layer):
    """A table by length in a global dictionary."""

    def change(self, h: Tensor) -> Any:
        length = len(h)
        if length not in _TABLES:
            _TABLES[length] = torch.arange(length)[:, None] * torch.ones(1, h.shape[1]) / 10
        return h * _TABLES[length].cos()


class LogsNorms(Net):
    """The model appends norms to a list in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, list[float]] = {"norms": []}

    def run(self, x: Tensor) -> Any:
        x = super().run(x)
        self.metrics["norms"].append(float(x.detach().norm()))
        return x


class AverageOfTheHead(Net):
    """An average of the head's weight, taken when its gradient is there."""

    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", self.head.weight.detach().clone())
        self.head.weight.register_post_accumulate_grad_hook(self.update)

    def update(self, weight: Tensor) -> None:
        self.ema.lerp_(weight.detach(), 0.1)


class Shifted(Layer):
    """Adds what it is given."""

    def forward(self, x: Tensor, shift: Tensor) -> Any:  # type: ignore[override]  # it takes more
        return x + (self.linear(x) + shift).sin()


class MeanGoesInAsACopy(Net):
    """Blocks get a running mean as an argument, cloned before the model moves it."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__(Shifted(), Shifted())
        self.register_buffer("shift", torch.zeros(WIDTH))

    def run(self, x: Tensor) -> Any:
        shift = self.shift.clone()
        for block in self.blocks:
            x = block(x, shift)
        self.shift += x.detach().mean(0)
        return x
