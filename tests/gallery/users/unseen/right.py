"""Right under checkpoints too, although it looks like what is not."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.gallery.users.authors.stacks import WIDTH, Plain
from tests.gallery.users.unseen.wrong import Layer, Model, built, three


class Logs(Layer):
    last = None

    def change(self, h):
        self.last = float(h.detach().norm())
        return h


def last_norm_logged():
    return three(Logs())


TABLES = {}


class Rotated(Layer):
    def change(self, h):
        length = len(h)
        if length not in TABLES:
            TABLES[length] = torch.arange(length)[:, None] * torch.ones(1, h.shape[1]) / 10
        return h * TABLES[length].cos()


def table_by_length_in_a_global():
    return three(Rotated())


class LayerScaled(Layer):
    alpha, beta, is_on, mode = 0.3, 2, True, "mul"

    def change(self, h):
        return h * self.alpha * self.beta if self.is_on and self.mode == "mul" else h


def constants_in_attributes():
    return three(LayerScaled())


class Optioned(Layer):
    def forward(self, x, options=None):
        return x + self.lin(x * options["gain"]).tanh()


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Optioned(), Optioned()])

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = block(x, options={"gain": 1.0 + place})
        return x


def options_made_for_each_block():
    return built(Options())


def constant_in_the_closure_of_a_hook():
    layer, gain = Layer(), torch.full((WIDTH,), 1.5)
    layer.lin.register_forward_hook(lambda _m, _a, out: out * gain)
    return three(layer)


class Standardised(Layer):
    def forward(self, x):
        weight = self.lin.weight
        weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)
        return x + F.linear(x, weight).tanh()


def standardised_weight():
    return three(Standardised())


class CountsOutside(Model):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / min(self.calls, 2)


def counter_outside_of_blocks():
    return built(CountsOutside(Plain(), Plain()))


class Residual(Layer):
    def forward(self, x, first):
        return x + (self.lin(x) * first).tanh()


class ValueResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x):
        first = self.value(x)
        for block in self.blocks:
            x = block(x, first)
        return x


def value_residual_as_an_argument():
    return built(ValueResidual())


class Causal(Layer):
    def change(self, h):
        mask = torch.ones(len(h), len(h)).tril().bool()
        return (h @ h.T).masked_fill(~mask, -1e9).softmax(-1) @ h


def mask_made_in_the_block():
    return three(Causal())


class DropsByAttribute(Layer):
    p = 0.3

    def change(self, h):
        return F.dropout(h, self.p, self.training)


def dropout_by_an_attribute():
    return three(DropsByAttribute())


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * value.relu())


def gated_with_kinks():
    return three(Gated())


class Lowered(Layer):
    def change(self, h):
        return h.bfloat16().sin().float()


def half_of_a_block_in_bf16():
    return three(Lowered())


class Sorted(Layer):
    def change(self, h):
        order = h[:, 0].argsort()
        kept = h[order][: int((h[:, 0] > 0).sum()) + 1]
        return h + kept.mean(0)


def shapes_that_data_decide():
    return three(Sorted())


class Delegating(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner.lin(self.lin(x)).tanh()


def wrapper_that_delegates():
    return three(Delegating())


@dataclasses.dataclass(frozen=True)
class Config:
    eps: float = 1e-3
    bias: bool = True
    heads: int = 2


class Configured(Layer):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def change(self, h):
        heads = h.view(len(h), self.config.heads, -1)
        return (heads / (heads.norm(dim=-1, keepdim=True) + self.config.eps)).flatten(1)


def frozen_configuration():
    return three(Configured())


class Scattered(Layer):
    def change(self, h):
        index = torch.arange(len(h)) % 2
        return torch.zeros(2, WIDTH).index_add_(0, index, h)[index]


def scatter_within_the_block():
    return three(Scattered())


class CountsAnew(Layer):
    count = 0

    def change(self, h):
        self.count = 0
        for _ in range(3):
            self.count += 1
            h = h / self.count
        return h


def counter_that_each_call_resets():
    return three(CountsAnew())
