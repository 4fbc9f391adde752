"""Blocks whose recomputation is not what forward was; torch raises in none of them."""

from __future__ import annotations

import contextvars
import random
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.gallery.users.authors.stacks import WIDTH, Example, Plain, Stack, around, example

_SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
_GLOBALS = {"calls": 0}


class Counting(Plain):
    """Warm-up: the output grows with the number of calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls))


class Tallying(Plain):
    """Counts its calls for a log; nothing reads the number."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        self.calls += 1
        return super().forward(x)


class Logging(Plain):
    """Appends a statistic to a list at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        self.means.append(float(x.detach().mean()))
        return super().forward(x)


class GlobalCounting(Plain):
    """Reads and moves a number of the Python module."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        _GLOBALS["calls"] = (_GLOBALS["calls"] + 1) % 2
        return super().forward(x * (1 + _GLOBALS["calls"]))


class PythonNoise(Plain):
    """Scales by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x * random.uniform(0.5, 1.5))


class NumpyNoise(Plain):
    """Adds noise of NumPy's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        noise = torch.from_numpy(np.random.rand(*x.shape)).to(x.dtype)  # noqa: NPY002 (what users write)
        return super().forward(x * noise)


class OwnGenerator(Plain):
    """Draws its mask from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x * (torch.rand(x.shape, generator=self.generator) > 0.5))


class Dropping(Plain):
    """Dropout, right under a checkpoint that keeps the random state."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Codebook(nn.Module):
    """Vector quantisation with an exponential average of its codes."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        hidden = self.linear(x)
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        quantised = self.codes[nearest] * hidden
        with torch.no_grad():
            self.codes[nearest] = 0.5 * self.codes[nearest] + 0.5 * hidden
        return quantised


class DelayedScaling(Plain):
    """Scales by the largest magnitude of the call before, as FP8 recipes do."""

    amax: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        hidden = self.linear(x) / self.amax.clone()
        self.amax.copy_(hidden.detach().abs().max())
        return hidden.tanh()


class Balancing(nn.Module):
    """A router without auxiliary loss: its bias moves in forward."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.5)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.bias).topk(1).indices.flatten()
        load = torch.bincount(chosen, minlength=4)
        self.bias.add_(10.0 * (load.float().mean() - load).sign())
        return torch.bmm(x.unsqueeze(1), self.experts[chosen]).squeeze(1) * scores.gather(1, chosen[:, None])


class Load(Plain):
    """Counts tokens in a buffer that nothing reads."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        self.seen.add_(x.shape[0])
        return super().forward(x)


class Normalised(Plain):
    """Batch normalisation inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(self.norm(x))


class Spectral(Plain):
    """Spectral norm: each forward takes one step of power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(self.linear)


class Remembering(Plain):
    """Mixes in what it saw in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        before = torch.zeros_like(x) if self.last is None else self.last
        self.last = x.detach().clone()
        return super().forward(x * (1 + before))


class Shrinking(Plain):
    """Decays its weight by itself in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        self.linear.weight.data.mul_(0.9)
        return super().forward(x)


class Averaging(Plain):
    """A plain tensor attribute, an average of activations, that scales the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        scale = 1 + self.average
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x * scale)


class FunctionState(Plain):
    """A counter on the function itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        step: Any = FunctionState.forward
        step.calls = getattr(step, "calls", 0) ^ 1
        return super().forward(x * (1 + step.calls))


class Contextual(Plain):
    """Scales by a context variable that the model sets while it runs its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x * _SCALE.get())


class ContextStack(Stack):
    """Sets the context variable for its forward only."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        token = _SCALE.set(2.0)
        outputs: Tensor = super().forward(x)
        _SCALE.reset(token)
        return outputs


class Switched(Plain):
    """Two paths; `fast` says which."""

    fast = False

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x if self.fast else 2 * x)


class SwitchingStack(Stack):
    """Turns `fast` on at the end of each forward and off at its begin."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        self.blocks[1].fast = False
        outputs: Tensor = super().forward(x)
        self.blocks[1].fast = True
        return outputs


class ScaledStack(Stack):
    """Its blocks read one buffer, which the head halves before backward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__([Plain(), Scaled(), Plain()])
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks[1].scales.append(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's outputs, (B, D)."""
        outputs: Tensor = super().forward(x)
        with torch.no_grad():
            self.scale.mul_(0.5)
        return outputs


class Scaled(Plain):
    """Scales by what somebody else owns."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return super().forward(x + self.scales[0].tolist()[0])


class FirstCall(Plain):
    """Takes another path, with more operators, in its very first call."""

    is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        if not self.is_ready:
            self.is_ready = True
            return super().forward(x.sin().exp().cos())
        return super().forward(x)


counting = partial(around, Counting)
tallying = partial(around, Tallying)
logging = partial(around, Logging)
global_counting = partial(around, GlobalCounting)
python_noise = partial(around, PythonNoise)
numpy_noise = partial(around, NumpyNoise)
own_generator = partial(around, OwnGenerator)
dropping = partial(around, Dropping)
codebook = partial(around, Codebook)
delayed_scaling = partial(around, DelayedScaling)
balancing = partial(around, Balancing)
load = partial(around, Load)
normalised = partial(around, Normalised)
spectral = partial(around, Spectral)
remembering = partial(around, Remembering)
shrinking = partial(around, Shrinking)
averaging = partial(around, Averaging)
function_state = partial(around, FunctionState)
first_call = partial(around, FirstCall)


def contextual() -> Example:
    """Return a stack whose context is over when backward runs."""
    return example(ContextStack([Plain(), Contextual(), Plain()]))


def switched() -> Example:
    """Return a stack that switches its middle block after forward."""
    return example(SwitchingStack([Plain(), Switched(), Plain()]))


def scaled() -> Example:
    """Return a stack whose shared buffer changes before backward."""
    return example(ScaledStack())
