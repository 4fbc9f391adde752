"""What a recomputation reads next to its inputs, and finds as forward did."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.gallery.parts import (
    WIDTH,
    Example,
    Layer,
    Net,
    example,
    linear,
)


class Flagged(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.use_gelu = True

    def change(self, h: Any) -> Any:
        return functional.gelu(h) if self.use_gelu else h


class Masked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Any] = {}

    def change(self, h: Any) -> Any:
        if len(h) not in self.masks:
            self.masks[len(h)] = torch.linspace(0, 1, len(h))[:, None]
        return h * self.masks[len(h)]


STRENGTH = contextvars.ContextVar("strength", default=1.5)


class Strong(Layer):
    def change(self, h: Any) -> Any:
        return h * STRENGTH.get()


class Scaled(Layer):
    def __init__(self, scale: Any = 0.5) -> None:
        super().__init__()
        self.scale = scale

    def change(self, h: Any) -> Any:
        return h * self.scale


def number_attribute() -> Example:
    """Blocks scale by a number."""
    return example(Net(Scaled(), Scaled(2.0)))


class Adapted(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: linear() for name in ("mine", "yours")})
        self.active = "mine"

    def change(self, h: Any) -> Any:
        return h + self.adapters[self.active](h)


def adapter_chosen_before_the_step() -> Example:
    """An adapter is chosen before the step and stays."""
    net = Net(Layer(), Adapted())
    net.blocks[1].active = "yours"
    return example(net)


class Careful(Layer):
    def change(self, h: Any) -> Any:
        if h.is_cuda or h.dtype != self.linear.weight.dtype or h.device != self.linear.weight.device:
            return h.to(self.linear.weight)
        return h * 0.5


class TrainsOtherwise(Layer):
    def change(self, h: Any) -> Any:
        return h * 1.5 if self.training else h


class Lazy(Layer):
    table = None

    def change(self, h: Any) -> Any:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, h.shape[-1])
        return h * self.table


class Rotary(Layer):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(32.0), 1 / 100 ** (torch.arange(WIDTH) / WIDTH))
        self.cos_cached: Any
        self.sin_cached: Any
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)

    def change(self, h: Any) -> Any:
        half = torch.cat((-h[:, WIDTH // 2 :], h[:, : WIDTH // 2]), -1)
        return h * self.cos_cached[: len(h)] + half * self.sin_cached[: len(h)]


def rotary_cache() -> Example:
    """Angles stand in buffers."""
    return example(Net(Rotary(), Rotary()))


class Attends(Layer):
    def forward(self, x: Any, mask: Any) -> Any:  # type: ignore[override]  # it takes more
        return x + (self.linear(x) @ x.T + mask).softmax(-1) @ x


class MaskOnce(Net):
    mask = None

    def run(self, x: Any) -> Any:
        if self.mask is None:
            self.mask = torch.full((len(x), len(x)), -1e4).triu(1)
        for block in self.blocks:
            x = block(x, self.mask[: len(x), : len(x)])
        return x


def attention_mask_built_once() -> Example:
    """The model builds a mask once and hands parts of it to its blocks."""
    return example(MaskOnce(Attends(), Attends()))


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.0)
        self.norm.num_batches_tracked = None

    def change(self, h: Any) -> Any:
        return self.norm(h)


class WeightNormed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(self.linear)


@functools.lru_cache
def ramp(count: Any) -> Any:
    return torch.linspace(0.5, 1.5, count)


class Ramped(Layer):
    def change(self, h: Any) -> Any:
        return h * ramp(h.shape[-1])


class FixedSlope(Layer):
    SLOPE = 0.2

    def change(self, h: Any) -> Any:
        return functional.leaky_relu(h, self.SLOPE)


SETTINGS = {"slope": 0.1}


class Settled(Layer):
    def change(self, h: Any) -> Any:
        return functional.leaky_relu(h, SETTINGS["slope"])


class Activated(Layer):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def change(self, h: Any) -> Any:
        return self.act(h)


def gain_enclosed_by_an_activation() -> Example:
    """An activation encloses a number."""
    gain = 1.7
    return example(Net(Layer(), Activated(lambda h: h * gain)))


def slope_bound_by_a_partial() -> Example:
    """A `functools.partial` binds a number."""
    return example(Net(Layer(), Activated(functools.partial(functional.leaky_relu, negative_slope=0.2))))


@dataclasses.dataclass
class Config:
    damping: float = 0.4
    name: str = "small"
    width: int = WIDTH


class Configured(Layer):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def change(self, h: Any) -> Any:
        return h * self.config.damping


def number_of_a_config() -> Example:
    """Blocks read a number of a dataclass that they share."""
    config = Config()
    return example(Net(Configured(config), Configured(config)))


def number_of_a_namespace() -> Example:
    """Blocks read a number of a namespace that they share."""
    config = types.SimpleNamespace(damping=0.4, name="small")
    return example(Net(Configured(config), Configured(config)))


class Listed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.alphas = [0.5, 1.5]

    def change(self, h: Any) -> Any:
        return h * self.alphas[0] + h.cos() * self.alphas[1]


def norm_and_dropout() -> Example:
    """Modules of torch read numbers of their own."""
    return example(Net(Layer(), nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.Dropout(0.2))))


class Skips(Net):
    use_skip, depth, every = True, 2, 1

    def run(self, x: Any) -> Any:
        y = super().run(x)
        return x + y if self.use_skip and self.depth % self.every == 0 else y


class Distils(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = linear().requires_grad_(requires_grad=False)

    def change(self, h: Any) -> Any:
        with torch.no_grad():
            target = self.teacher(h)
        return h * target.sigmoid()


class LayerScaled(Layer):
    alpha, beta, is_on, mode = 0.3, 2, True, "mul"

    def change(self, h: Any) -> Any:
        return h * self.alpha * self.beta if self.is_on and self.mode == "mul" else h


class DropsByAttribute(Layer):
    p = 0.3

    def change(self, h: Any) -> Any:
        return functional.dropout(h, self.p, self.training)
