"""Blocks and models as users write them: one row an idiom, in small shapes."""

from __future__ import annotations

import collections
import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from strategies.step.late_value import LateValue

WIDTH = 8
WIDE = 2 * WIDTH
ROWS, TOKENS = 4, 6

Between: TypeAlias = Callable[[Any, Tensor], Tensor]
Parts: TypeAlias = Callable[[], dict[str, Any]]


class Block(nn.Module):
    """Two linears around an idiom, with a residual."""

    def __init__(self, between: Between, parts: Parts = dict) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self._between = between
        for name, part in parts().items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(self._between(self, self.up(x)).tanh())
        return outputs


class Whole(Block):
    """A block that is the idiom."""

    def forward(self, x: Tensor) -> Tensor:
        return self._between(self, x)


class Model(nn.Module):
    """Blocks under `layers` between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.through(self.inner(x)))
        return outputs

    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


class Square(torch.autograd.Function):
    """Saves an input and what it has computed of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        product: Tensor = y * x
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        product: Tensor = gradient * (y * x + y)
        return product


class AskedAgain(Square):
    """Asks three times for what it has saved, and lets go of one before it asks again."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y = ctx.saved_tensors[1]
        product: Tensor = gradient * y
        del y
        product += product * ctx.saved_tensors[0]
        product += 0 * ctx.saved_tensors[1]
        return product


class Twice(torch.autograd.Function):
    """Saves two values, and reads one of them in two products."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        product: Tensor = a * b
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        assert type(a) is not LateValue
        return gradient * b, gradient * a + 0 * a


class Dirty(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class HoldsGraph(torch.autograd.Function):
    """Saves a tensor with a graph of its own, which backward does not ask for what it holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            outputs = (leaf @ weight).sin()
        ctx.save_for_backward(leaf, weight, outputs)
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        leaf, weight, _ = ctx.saved_tensors
        with torch.enable_grad():
            given = leaf.detach().requires_grad_(), weight.detach().requires_grad_()
            outputs = (given[0] @ given[1]).sin()
        return torch.autograd.grad(outputs, given, gradient)


def written_rows(_: Any, h: Tensor) -> Tensor:
    rows = torch.empty_like(h)
    for number in range(h.shape[0]):
        rows[number] = h[number].sin().exp()
    return rows


def written_view(_: Any, h: Tensor) -> Tensor:
    h[..., ::2].relu_()
    return h.sin()


def written_slice(_: Any, h: Tensor) -> Tensor:
    h[..., :3] = h[..., 3:6].clone().sin()
    return h


def two_views(_: Any, h: Tensor) -> Tensor:
    y = h.clone()
    first, second = y[..., :WIDTH], y[..., WIDTH:]
    first.relu_()
    return torch.cat([first.exp() * second.sin(), y[..., :WIDTH]], -1)


def scanned(_: Any, h: Tensor) -> Tensor:
    state, states = torch.zeros_like(h[:, 0]), torch.empty_like(h)
    for token in range(h.shape[1]):
        state = 0.5 * state + h[:, token].sin()
        states[:, token] = state
    return states


def attention(block: Any, h: Tensor) -> Tensor:
    q, k, v = block.qkv(h).unflatten(-1, (3, 2, WIDTH)).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(-2)


def masked_scores(_: Any, h: Tensor) -> Tensor:
    scores = h @ h.transpose(1, 2) / 4.0
    scores += torch.full((TOKENS, TOKENS), -math.inf).triu_(1)
    return scores.softmax(-1) @ h


def softmax_by_hand(_: Any, h: Tensor) -> Tensor:
    scores = h @ h.transpose(1, 2)
    scores -= scores.amax(-1, keepdim=True).detach()
    scores.exp_()
    shares = scores / scores.sum(-1, keepdim=True)
    return shares @ h


def complex_positions(block: Any, h: Tensor) -> Tensor:
    turned = torch.view_as_complex(h.unflatten(-1, (WIDTH, 2))) * block.turn
    return torch.view_as_real(turned).flatten(-2)


def complex_positions_in_place(block: Any, h: Tensor) -> Tensor:
    turned = torch.view_as_complex(h.unflatten(-1, (WIDTH, 2))).mul_(block.turn)
    return torch.view_as_real(turned).flatten(-2)


def cell_by_cell(block: Any, h: Tensor) -> Tensor:
    state, outputs = None, []
    for token in h.unbind(1):
        state = block.cell(token, state)
        outputs.append(state[0])
    return torch.stack(outputs, 1)


def autocasts(block: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = block.linear(block.linear(h)).relu_()
    return y.float()


def clamped_without_gradient(_: Any, h: Tensor) -> Tensor:
    y = h * 1
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y.sin()


def running_mean(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        mean: Tensor = block.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
    return h - mean


def clamped_parameter(block: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        block.weight.clamp_(-1, 1)
    product: Tensor = h * block.weight
    return product


def low_rank(block: Any, h: Tensor) -> Tensor:
    y: Tensor = block.frozen(h)
    y += block.outer(functional.dropout(block.lower(h), 0.1)) * 2
    return y


def gradient_inside(_: Any, h: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(leaf.sin().square().sum(), leaf)
    return h * gradient


def gradient_of_product_inside(_: Any, h: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf.sin().square() * leaf.tanh()).sum(), leaf)
    return h * gradient


def hooked(_: Any, h: Tensor) -> Tensor:
    y = h.sin()
    y.register_hook(lambda gradient: gradient * 2)
    return y.exp()


def own_generator(_: Any, h: Tensor) -> Tensor:
    return h * torch.rand(h.shape, generator=torch.Generator().manual_seed(3))


def foreach(_: Any, h: Tensor) -> Tensor:
    parts = [h.sin(), h.cos()]
    with torch.no_grad():
        torch._foreach_mul_(parts, 2.0)
    return parts[0] * parts[1]


def cached(block: Any, h: Tensor) -> Tensor:
    block.__dict__["cache"] = h.sin()
    result: Tensor = block.cache.exp()
    return result


def linear() -> nn.Linear:
    return nn.Linear(WIDE, WIDE)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(linear())


def turn() -> dict[str, Any]:
    return {"turn": torch.polar(torch.ones(WIDTH), torch.arange(WIDTH).float())}


def numbers() -> Tensor:
    return torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 10


def flat(module: Any, h: Tensor) -> Tensor:
    outputs: Tensor = module(h.flatten(0, 1)).unflatten(0, h.shape[:2])
    return outputs


def channels_first(module: Any, h: Tensor) -> Tensor:
    outputs: Tensor = module(h.transpose(1, 2)).transpose(1, 2)
    return outputs


def used(norm: nn.BatchNorm1d, h: Tensor) -> Tensor:
    return functional.batch_norm(h, norm.running_mean, norm.running_var)


def batch_norm_anew(h: Tensor) -> Tensor:
    return functional.batch_norm(h, torch.zeros(WIDE), torch.ones(WIDE), training=True)


def only(name: str, make: Callable[[], Any]) -> Parts:
    return lambda: {name: make()}


IN_PLACE: dict[str, Between] = {
    "relu_": lambda _, h: h.relu_(),
    "a module of its own": lambda _, h: nn.ReLU(inplace=True)(h),
    "add_ and mul_": lambda _, h: h.add_(1).mul_(0.5),
    "clamp_": lambda _, h: h.clamp_(-1, 1),
    "silu": lambda _, h: functional.silu(h, inplace=True),
    "dropout": lambda _, h: functional.dropout(h, 0.3, inplace=True),
    "masked_fill_": lambda _, h: h.masked_fill_(h > 0.5, 0.0),
    "index_put_": lambda _, h: h.index_put_((torch.tensor([0, 1]),), torch.zeros_like(h[:2])),
    "index_add_": lambda _, h: h.index_add_(0, torch.tensor([0, 1]), h[:2].clone()),
    "a slice": written_slice,
    "a view": written_view,
    "a transposed view": lambda _, h: h.transpose(0, 1).relu_().transpose(0, 1),
    "a view of other dimensions": lambda _, h: h.view(-1).relu_().view_as(h),
}
"""What is done to the result of a linear layer, which is a view where the input has three dimensions."""

BETWEEN: dict[str, tuple[Between, Parts]] = {
    "chunks": (
        lambda _, h: torch.cat([functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]] * 2, -1),
        dict,
    ),
    "a gated product": (
        lambda b, h: functional.silu(b.gate(h)) * b.wide(h),
        lambda: {"gate": linear(), "wide": linear()},
    ),
    "a product in place": (lambda _, h: h.cos().mul_(h.tanh()), dict),
    "a product that broadcasts both": (
        lambda _, h: h.exp().mean(-1, True) * h.tanh().mean(1, True) + h,
        dict,
    ),
    "a product with a number of its own": (lambda _, h: h.exp() * h.tanh().sum(), dict),
    "a product of two dtypes": (lambda _, h: h.exp() * h.tanh().bfloat16(), dict),
    "a product with what nobody differentiates": (lambda _, h: h.exp() * h.detach().tanh(), dict),
    "a product of products": (lambda _, h: h.exp() * h.tanh() * h.sin() * h.cos(), dict),
    "a function of one's own before a product": (lambda _, h: Twice.apply(h.exp(), h.tanh()) * 2.0, dict),
    "results before a product with a mask": (lambda _, h: h.exp().reciprocal() * (h.detach() > 0), dict),
    "a product of results before one with a mask": (
        lambda _, h: h.sigmoid().cumprod(-1) * (h.detach() > 0),
        dict,
    ),
    "splits": (lambda _, h: torch.cat([part * part for part in h.split([3, 5, 8], -1)], -1), dict),
    "unbound": (lambda _, h: torch.stack([part.exp() for part in h.unbind(1)], 1), dict),
    "narrowed": (
        lambda _, h: torch.cat([h.narrow(-1, 0, WIDTH).exp(), h.narrow(-1, WIDTH, WIDTH)], -1),
        dict,
    ),
    "expanded": (lambda _, h: h * h.mean(0, keepdim=True).expand(ROWS, -1, -1).exp(), dict),
    "permuted": (lambda _, h: (h @ h.transpose(1, 2)).softmax(-1) @ h, dict),
    "rows written one by one": (written_rows, dict),
    "two views, one written": (two_views, dict),
    "a scan into a tensor": (scanned, dict),
    "attention of one projection": (attention, only("qkv", lambda: nn.Linear(WIDE, 3 * WIDE))),
    "scores with a mask in place": (masked_scores, dict),
    "a softmax by hand, in place": (softmax_by_hand, dict),
    "einsum": (lambda _, h: torch.einsum("bij,bkj->bik", h, h).softmax(-1).matmul(h), dict),
    "complex positions": (complex_positions, turn),
    "complex positions in place": (complex_positions_in_place, turn),
    "a Fourier transform": (lambda _, h: torch.fft.irfft(torch.fft.rfft(h) * 2, n=WIDE), dict),
    "a module twice": (lambda b, h: b.linear(b.linear(h).tanh()), only("linear", linear)),
    "batch norm": (lambda b, h: flat(b.norm, h).relu(), only("norm", lambda: nn.BatchNorm1d(WIDE))),
    "batch norm, units in place": (
        lambda b, h: flat(b.norm, h).relu_(),
        only("norm", lambda: nn.BatchNorm1d(WIDE)),
    ),
    "batch norm that watches a value, which is written to afterwards": (
        lambda b, h: (flat(b.norm, h.detach()), h.relu_(), h.detach().repeat(1, 1, 16))[1],
        only("norm", lambda: nn.BatchNorm1d(WIDE, affine=False)),
    ),
    "batch norm twice": (
        lambda b, h: flat(b.norm, flat(b.norm, h).relu_()).tanh(),
        only("norm", lambda: nn.BatchNorm1d(WIDE)),
    ),
    "batch norm that does not train": (
        lambda b, h: flat(b.norm, h).relu(),
        only("norm", lambda: nn.BatchNorm1d(WIDE).eval()),
    ),
    "batch norm, its statistics read before": (
        lambda b, h: flat(b.norm, (h - b.norm.running_mean).exp()),
        only("norm", lambda: nn.BatchNorm1d(WIDE)),
    ),
    "batch norm, its statistics used before": (
        lambda b, h: flat(b.norm, flat(partial(used, b.norm), h).exp()),
        only("norm", lambda: nn.BatchNorm1d(WIDE)),
    ),
    "batch norm of statistics of its own": (
        lambda _, h: flat(batch_norm_anew, h).relu(),
        dict,
    ),
    "instance norm with statistics": (
        lambda b, h: channels_first(b.norm, h).relu(),
        only("norm", lambda: nn.InstanceNorm1d(WIDE, affine=True, track_running_stats=True)),
    ),
    "group norm": (lambda b, h: channels_first(b.norm, h), only("norm", lambda: nn.GroupNorm(4, WIDE))),
    "root mean square norm": (lambda b, h: b.norm(h), only("norm", lambda: nn.RMSNorm(WIDE))),
    "a convolution": (
        lambda b, h: channels_first(b.conv, h),
        only("conv", lambda: nn.Conv1d(WIDE, WIDE, 3, padding=1)),
    ),
    "a depthwise convolution, units in place": (
        lambda b, h: channels_first(b.conv, h).relu_(),
        only("conv", lambda: nn.Conv1d(WIDE, WIDE, 3, padding=1, groups=WIDE)),
    ),
    "spectral norm": (
        lambda b, h: b.linear(h),
        only("linear", spectral),
    ),
    "spectral norm by a hook": (
        lambda b, h: b.linear(h),
        only("linear", lambda: nn.utils.spectral_norm(linear())),
    ),
    "a recurrent layer": (
        lambda b, h: b.layer(h)[0],
        only("layer", lambda: nn.LSTM(WIDE, WIDE, batch_first=True)),
    ),
    "gated recurrent units": (
        lambda b, h: b.layer(h)[0],
        only("layer", lambda: nn.GRU(WIDE, WIDE, batch_first=True)),
    ),
    "a recurrent cell": (cell_by_cell, only("cell", lambda: nn.LSTMCell(WIDE, WIDE))),
    "multi-head attention": (
        lambda b, h: b.attend(h, h, h)[0],
        only("attend", lambda: nn.MultiheadAttention(WIDE, 2, batch_first=True)),
    ),
    "multi-head attention with dropout": (
        lambda b, h: b.attend(h, h, h, need_weights=False)[0],
        only("attend", lambda: nn.MultiheadAttention(WIDE, 2, dropout=0.1, batch_first=True)),
    ),
    "an embedding": (
        lambda b, h: h + b.table(b.ids),
        lambda: {"table": nn.Embedding(10, WIDE, padding_idx=0), "ids": numbers()},
    ),
    "an embedding that renorms": (
        lambda b, h: h + b.table(b.ids),
        lambda: {"table": nn.Embedding(10, WIDE, max_norm=1.0), "ids": numbers()},
    ),
    "a function of the user": (lambda _, h: Square.apply(h), dict),
    "a function that writes to its input": (lambda _, h: Dirty.apply(h * 1).sin(), dict),
    "a function that asks again for what it saved": (lambda _, h: AskedAgain.apply(h.sin()).tanh(), dict),
    "a function that holds a graph": (
        lambda b, h: HoldsGraph.apply(h, b.weight),
        only("weight", lambda: nn.Parameter(torch.randn(WIDE, WIDE) * 0.1)),
    ),
    "a checkpoint": (
        lambda b, h: checkpoint(lambda given: b.linear(given).sin().exp(), h, use_reentrant=False),
        only("linear", linear),
    ),
    "a checkpoint whose input is read several times": (
        lambda b, h: checkpoint(lambda given: given.sin() * given, b.linear(h).exp(), use_reentrant=False),
        only("linear", linear),
    ),
    "a reentrant checkpoint": (
        lambda b, h: checkpoint(lambda given: b.linear(given).sin().exp(), h, use_reentrant=True),
        only("linear", linear),
    ),
    "autocast": (autocasts, only("linear", linear)),
    "a part without gradients": (lambda _, h: h * torch.no_grad()(lambda: h.exp().cos())(), dict),
    "a write without gradients": (clamped_without_gradient, dict),
    "detached": (lambda _, h: h + (h.round() - h).detach(), dict),
    "a running mean": (running_mean, only("mean", lambda: torch.zeros(WIDE))),
    "one tensor for two arguments": (
        lambda b, h: b.bilinear(h, h),
        only("bilinear", lambda: nn.Bilinear(WIDE, WIDE, WIDE)),
    ),
    "a frozen layer": (lambda b, h: b.linear(h), only("linear", lambda: linear().requires_grad_(False))),
    "a low-rank adapter in place": (
        low_rank,
        lambda: {
            "frozen": linear().requires_grad_(False),
            "lower": nn.Linear(WIDE, 2, bias=False),
            "outer": nn.Linear(2, WIDE, bias=False),
        },
    ),
    "a part in half precision": (lambda _, h: h.bfloat16().sin().exp().float(), dict),
    "a choice by value": (lambda _, h: torch.where(h > 0, h.exp(), h), dict),
    "the largest of a row": (
        lambda _, h: torch.zeros_like(h).scatter(-1, h.topk(3, -1).indices, h.topk(3, -1).values),
        dict,
    ),
    "noise": (lambda _, h: h * torch.rand_like(h) + torch.randn(WIDE), dict),
    "noise of an own generator": (own_generator, dict),
    "stochastic depth": (lambda _, h: h.sin() * h.new_empty(ROWS, 1, 1).bernoulli_(0.7).div_(0.7), dict),
    "self-normalising dropout": (lambda _, h: functional.alpha_dropout(h, 0.3, training=True), dict),
    "a scale of each channel": (
        lambda b, h: b.scale * h.sin(),
        only("scale", lambda: nn.Parameter(torch.ones(WIDE))),
    ),
    "learned leaky units": (lambda b, h: b.units(h), only("units", nn.PReLU)),
    "a parameter that is clamped": (
        clamped_parameter,
        only("weight", lambda: nn.Parameter(torch.ones(WIDE))),
    ),
    "a factor of the mean": (
        lambda _, h: h * functional.adaptive_avg_pool1d(h.transpose(1, 2), 1).transpose(1, 2),
        dict,
    ),
    "pooling": (lambda _, h: functional.max_pool1d(h, 2).repeat(1, 1, 2), dict),
    "a gradient inside": (gradient_inside, dict),
    "a hook on a tensor": (hooked, dict),
    "torch.vmap": (lambda _, h: torch.vmap(lambda row: row.sin().exp())(h), dict),
    "foreach, in place": (foreach, dict),
    "a tensor that the module keeps": (cached, dict),
    "a branch that nobody uses": (lambda _, h: (h.exp().sin(), h)[1], dict),
}
"""What a block does between its linears, and with which parts."""


class Nest(nn.Module):
    """Takes tensors by name, and gives a nest of tensors and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(
        self, x: Tensor, factor: Tensor | None = None, *, scale: float, extra: Any = None
    ) -> dict[str, Any]:
        h = self.up(x).sin().exp()
        h = h if factor is None else h * factor
        return {"x": x + self.down(h) * scale, "more": (h, extra), "aux": [h.mean()]}


class Nests(Model):
    def __init__(self) -> None:
        super().__init__(Nest)

    def through(self, x: Tensor) -> Tensor:
        factor, aux = None, torch.zeros(())
        for block in self.layers:
            found = block(x, factor, scale=0.5, extra={"x": x})
            x, factor, aux = found["x"], found["more"][0], aux + found["aux"][0]
        return x + aux


class KeptOutputs(Model):
    """Holds outputs that no loss depends on until after backward, and drops others at once."""

    def __init__(self) -> None:
        super().__init__(Nest)

    def through(self, x: Tensor) -> Tensor:
        held: list[Tensor] = []
        self.__dict__["held"] = held
        for block in self.layers:
            found = block(x, scale=0.5)
            held.append(found["more"][0].exp())
            x = found["x"]
        return x


class Pair(nn.Module):
    """Takes two tensors, which may be one, and gives two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return b + self.first(a).tanh(), a * self.second(b).sigmoid()


class Pairs(Model):
    def __init__(self) -> None:
        super().__init__(Pair)

    def through(self, x: Tensor) -> Tensor:
        a = b = x
        for block in self.layers:
            a, b = block(a, b)
        return a + b


class FirstInput(Model):
    """Gives the first input to each block."""

    def __init__(self) -> None:
        super().__init__(Pair)

    def through(self, x: Tensor) -> Tensor:
        y = x
        for block in self.layers:
            y = block(y, x)[0]
        return y


def saving(_: Any, h: Tensor) -> Tensor:
    return h.exp().sin()


class Plain(Model):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__(lambda: Block(saving), blocks)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        first: Any = self.layers[0]
        for block in self.layers:
            assert isinstance(block, Block)
            block.up.weight = first.up.weight


class PartlyFrozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(requires_grad=False)
        self.layers[0].requires_grad_(requires_grad=False)


class FrozenGradients(Model):
    """Blocks that go backward themselves; of the first nothing else does."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(gradient_of_product_inside), blocks=4)
        self.inner.requires_grad_(requires_grad=False)
        self.layers[0].requires_grad_(requires_grad=False)


class Half(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class WrittenOutputs(Plain):
    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
            x += 1
        return x


class InOrder(Model):
    """Calls its blocks by number."""

    def __init__(self, *numbers: int, between: Between = saving, parts: Parts = dict) -> None:
        super().__init__(lambda: Block(between, parts), blocks=3)
        self.numbers = numbers

    def through(self, x: Tensor) -> Tensor:
        for number in self.numbers:
            x = self.layers[number](x)
        return x


class Decaying(Model):
    """Has a buffer that blocks read, and writes to it between them."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(lambda: Block(lambda _, h: h * self.scale.cos().expand(h.shape).contiguous()))
        self.register_buffer("scale", torch.rand(WIDE))

    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
            self.scale.mul_(0.9)
        return x


class Turned(Plain):
    """Calls a block for rows, and for columns."""

    def through(self, x: Tensor) -> Tensor:
        first, second = self.layers
        outputs: Tensor = first(second(first(x)).transpose(0, 1).contiguous())
        return outputs.transpose(0, 1)


class Siamese(Plain):
    """Compares what its blocks make of two inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - super().forward(x.flip(0))


def normed(block: Any, h: Tensor) -> Tensor:
    outputs: Tensor = functional.dropout(flat(block.norm, h).relu_(), 0.1)
    return outputs


class Teacher(Plain):
    """Runs without gradients before."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) - target


def graph_of_gradient(_: Any, h: Tensor) -> Tensor:
    copy = h * 1
    (gradient,) = torch.autograd.grad(copy.sin().square().sum(), copy, create_graph=True)
    return gradient * 1


def by_torch_func(_: Any, h: Tensor) -> Tensor:
    gradient: Tensor = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(h)
    return gradient * h


class OneDifferentiates(Plain):
    """Differentiates in one block, which plans leave as it is."""

    def __init__(self, number: int, between: Between) -> None:
        super().__init__()
        self.layers[number] = Block(between)


class OneEvaluates(Model):
    def __init__(self) -> None:
        super().__init__(lambda: Block(lambda block, h: functional.dropout(h.exp(), 0.1, block.training)))
        self.layers[0].eval()


def written_after(block: Any, x: Tensor) -> Tensor:
    read = x.tanh()
    outputs: Tensor = x.relu_() * block.down(block.up(read))
    return outputs


def encoder() -> Block:
    return Whole(
        lambda block, x: block.layer(x),
        only("layer", lambda: nn.TransformerEncoderLayer(WIDTH, 2, WIDE, dropout=0.1, batch_first=True)),
    )


def decoder() -> Block:
    return Whole(
        lambda block, x: block.layer(x, x),
        only("layer", lambda: nn.TransformerDecoderLayer(WIDTH, 2, WIDE, dropout=0.1, batch_first=True)),
    )


class Worded(Plain):
    """Tokens before the blocks, a norm and a head behind them.

    Args:
        begin: returns the first block's input of tokens.
        end: returns outputs of what the last block returns.
    """

    def __init__(
        self,
        begin: Callable[[Any, Tensor], Tensor] = lambda model, tokens: model.words(tokens),
        end: Callable[[Any, Tensor], Tensor] = lambda model, x: model.head(model.norm(x)),
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm: nn.Module = nn.RMSNorm(WIDTH)
        self.middle = nn.RMSNorm(WIDTH)
        self.__dict__["ends"] = begin, end

    def forward(self, x: Tensor) -> Tensor:
        begin, end = self.__dict__["ends"]
        tokens = (x[..., 0].abs() * TOKENS).long() % TOKENS
        outputs: Tensor = end(self, self.through(begin(self, tokens)))
        return outputs


class NormBetween(Worded):
    def through(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers[1](self.middle(self.layers[0](x)))
        return outputs


def with_places(model: Worded, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[-1])
    x: Tensor = model.words(tokens) + model.places(positions)
    return x


def scaled_in_place(model: Worded, tokens: Tensor) -> Tensor:
    x: Tensor = model.words(tokens).mul_(WIDTH**0.5)
    return x


def read_between(model: Worded, tokens: Tensor) -> Tensor:
    x: Tensor = model.words(tokens)
    model.__dict__["size"] = x.detach().norm()
    return x


def without_gradients(model: Worded, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        x: Tensor = model.words(tokens)
    return x


def two_heads(model: Worded, x: Tensor) -> Tensor:
    x = model.norm(x)
    outputs: Tensor = model.head(x) + model.head(x.tanh())
    return outputs


def tied_head(model: Worded, x: Tensor) -> Tensor:
    return functional.linear(model.norm(x), model.words.weight)


def written_norm(model: Worded, x: Tensor) -> Tensor:
    outputs: Tensor = model.head(model.norm(x).mul_(2))
    return outputs


def norm_saved_around(model: Worded, x: Tensor) -> Tensor:
    y = model.norm(x)
    outputs: Tensor = model.head(y) * y.exp().sum()
    return outputs


class Shifted(Plain):
    """Adds a buffer before the blocks, and writes to it at once."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) + self.shift
        self.shift.add_(1)
        outputs: Tensor = self.head(self.through(h))
        return outputs


def some_tokens(model: Worded, tokens: Tensor) -> Tensor:
    x: Tensor = model.words(tokens)
    return x[:, torch.rand(TOKENS).argsort()[:4]]


def with_noise(model: Worded, tokens: Tensor) -> Tensor:
    x: Tensor = functional.dropout(model.words(tokens) + torch.randn(WIDTH), 0.2)
    return x


def by_rows(model: Worded, tokens: Tensor) -> Tensor:
    x: Tensor = torch.vmap(model.words)(tokens)
    return functional.layer_norm(x + model.places.weight, (WIDTH,))


def remembered(model: Worded, tokens: Tensor) -> Tensor:
    x: Tensor = model.words(tokens)
    model.__dict__["embedded"] = x
    return x * 2


def of_the_embedding(model: Worded, x: Tensor) -> Tensor:
    outputs: Tensor = model.norm(x) @ model.__dict__["embedded"].transpose(1, 2)
    return outputs


class Renormalised(Worded):
    """Has an embedding that writes to its weight, and a norm that keeps an average."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, WIDTH, max_norm=0.5)
        self.norm = nn.BatchNorm1d(TOKENS)


BESIDE: dict[str, Callable[[], Model]] = {
    "an embedding before": Worded,
    "positions that the model adds": lambda: Worded(begin=with_places),
    "an embedding scaled in place": lambda: Worded(begin=scaled_in_place),
    "an embedding that is looked at": lambda: Worded(begin=read_between),
    "an embedding without gradients": lambda: Worded(begin=without_gradients),
    "a head called twice": lambda: Worded(end=two_heads),
    "a head that is the embedding": lambda: Worded(end=tied_head),
    "a head of the last token": lambda: Worded(end=lambda model, x: model.head(model.norm(x)[:, -1])),
    "a head of tokens in another order": lambda: Worded(
        end=lambda model, x: model.head(model.norm(x).flip(1))
    ),
    "a norm written in place": lambda: Worded(end=written_norm),
    "a norm that others save": lambda: Worded(end=norm_saved_around),
    "a norm called twice": lambda: Worded(end=lambda model, x: model.head(model.norm(model.norm(x)))),
    "a norm between blocks": NormBetween,
    "tokens that are drawn": lambda: Worded(begin=some_tokens),
    "noise and dropout before": lambda: Worded(begin=with_noise),
    "rows by torch.func": lambda: Worded(begin=by_rows),
    "outputs of the embedding": lambda: Worded(begin=remembered, end=of_the_embedding),
    "an embedding that renormalises, a norm over the batch": Renormalised,
}
"""What stands beside the blocks."""


MODELS: dict[str, Callable[[], Model]] = {
    "nests of tensors, by name": Nests,
    "outputs that no loss depends on": KeptOutputs,
    "several tensors, one given twice": Pairs,
    "the first input for each block": FirstInput,
    "a buffer written before the blocks": Shifted,
    "weights tied between blocks": Tied,
    "a frozen first block": PartlyFrozen,
    "bfloat16": Half,
    "autocast around the model": Autocast,
    "outputs written in place by the model": WrittenOutputs,
    "a block that is not called, and one called twice": lambda: InOrder(0, 2, 2),
    "a block called four times": lambda: InOrder(0, 0, 0, 0),
    "blocks called in turns": lambda: InOrder(0, 1, 2, 0, 1, 2),
    "blocks with batch norms, called in turns": lambda: InOrder(
        0, 1, 0, 1, between=normed, parts=only("norm", lambda: nn.BatchNorm1d(WIDE))
    ),
    "blocks with spectral norms, called in turns": lambda: InOrder(
        0, 1, 0, 1, between=lambda b, h: b.linear(h).exp(), parts=only("linear", spectral)
    ),
    "a buffer that is written between blocks": Decaying,
    "blocks called for two inputs": Siamese,
    "a block called for inputs of two shapes": Turned,
    "a forward without gradients before": Teacher,
    "a block in evaluation mode": OneEvaluates,
    "a graph of a gradient in the second block": lambda: OneDifferentiates(1, graph_of_gradient),
    "torch.func.grad in the first block": lambda: OneDifferentiates(0, by_torch_func),
    "torch.func.grad in the second block": lambda: OneDifferentiates(1, by_torch_func),
    "inputs written in place": lambda: Model(
        lambda: Whole(lambda block, x: block.down(block.up(x.relu_()).relu_()))
    ),
    "inputs read, and then written in place": lambda: Model(lambda: Whole(written_after)),
    "a gradient of a product inside": lambda: Model(lambda: Block(gradient_of_product_inside), blocks=4),
    "a gradient of a product inside a frozen block": FrozenGradients,
    "encoder layers of torch": lambda: Model(encoder),
    "decoder layers of torch": lambda: Model(decoder),
}


class Checkpointed(Plain):
    """Has checkpoints of its own around blocks."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def of(between: Between, parts: Parts = dict) -> Callable[[], Model]:
    """Return what makes a model of blocks with an idiom between their linears."""
    return lambda: Model(lambda: Block(between, parts))


def resized(_: Any, h: Tensor) -> Tensor:
    return h * torch.empty(0).resize_(h.shape).copy_(h.detach())


OWN_CHECKPOINT = "runs inside of a checkpoint of the model's own, which recomputes what a plan would keep"
REFUSED: dict[str, tuple[Callable[[], Model], str]] = {
    "checkpoints around blocks": (lambda: Checkpointed(use_reentrant=False), OWN_CHECKPOINT),
    "reentrant checkpoints around blocks": (lambda: Checkpointed(use_reentrant=True), OWN_CHECKPOINT),
    "a tensor that is resized": (
        of(resized),
        "aten.resize_.default in 'layers.0' moves memory between tensors",
    ),
}
"""Models that are refused, and the words."""

WITHOUT_DATA: dict[str, tuple[Callable[[], Model], str]] = {
    "a number read of data": (
        of(lambda _, h: h * float(h.detach().max().item() > 0)),
        "on tensors without memory",
    ),
    "an array of NumPy": (
        of(lambda _, h: h * torch.from_numpy(h.detach().numpy().copy())),
        "on tensors without memory",
    ),
    "rows chosen by a mask": (
        of(
            lambda block, h: torch.zeros_like(h).index_put((block.mask,), h[block.mask].exp()),
            lambda: {"mask": numbers() > 3},
        ),
        "on tensors without memory",
    ),
    "a hook that computes": (
        of(lambda block, h: block.linear(h), only("linear", lambda: doubling(linear()))),
        "'layers.0' is not as it was planned",
    ),
}
"""Models that a first call cannot plan, and the words; a step with data plans them."""


def doubling(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *given: given[-1] * 2)
    return module


class Counter:
    """Counts."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        """Return the next number."""
        self.count += 1
        return self.count


def counted() -> tuple[Any, Between]:
    state = Counter()
    return state, lambda block, h: h / block.state.next()


def grown() -> tuple[Any, Between]:
    state = bytearray(b"a")
    return state, lambda block, h: (block.state.extend(b"a"), h / len(block.state))[1]


def tallied() -> tuple[Any, Between]:
    state = collections.Counter[str]()
    return state, lambda block, h: (block.state.update(["call"]), h / block.state["call"])[1]


def added_up() -> tuple[Any, Between]:
    state = np.ones(1)
    return state, lambda block, h: (block.state.__iadd__(1), h / float(block.state[0]))[1]


def counting_in_a_closure() -> tuple[Any, Between]:
    count = 0

    def counter() -> int:
        nonlocal count
        count += 1
        return count

    return counter, lambda block, h: h / block.state()


def counting_in_an_attribute() -> tuple[Any, Between]:
    def counter() -> int:
        vars(counter)["count"] += 1
        found: int = vars(counter)["count"]
        return found

    vars(counter)["count"] = 0
    return counter, lambda block, h: h / block.state()


def counting_in_an_attribute_that_a_call_adds() -> tuple[Any, Between]:
    def counter() -> int:
        vars(counter)["count"] = found = int(vars(counter).get("count", 0)) + 1
        return found

    return counter, lambda block, h: h / block.state()


def counting_in_a_default() -> tuple[Any, Between]:
    def counter(calls: list[int] = []) -> int:  # noqa: B006 (what is tested)
        calls.append(1)
        return len(calls)

    return counter, lambda block, h: h / block.state()


def counting_in_a_default_by_name() -> tuple[Any, Between]:
    def counter(*, calls: list[int] = []) -> int:  # noqa: B006 (what is tested)
        calls.append(1)
        return len(calls)

    return counter, lambda block, h: h / block.state()


def counting_in_a_list_of_a_closure() -> tuple[Any, Between]:
    counts = [0]

    def counter() -> int:
        counts[0] += 1
        return counts[0]

    return counter, lambda block, h: h / block.state()


STATES: dict[str, Callable[[], tuple[Any, Between]]] = {
    "a variable of a closure": counting_in_a_closure,
    "a list in a closure": counting_in_a_list_of_a_closure,
    "an attribute of a function": counting_in_an_attribute,
    "an attribute of a function that a call adds": counting_in_an_attribute_that_a_call_adds,
    "a default": counting_in_a_default,
    "a default by name": counting_in_a_default_by_name,
    "an object of one's own": counted,
    "one in a list": lambda: ([Counter()], lambda block, h: h / block.state[0].next()),
    "bytes that grow": grown,
    "a tally": tallied,
    "an array in place": added_up,
    "a generator of Python": lambda: (random.Random(0), lambda block, h: h * block.state.random()),
    "a generator of NumPy": lambda: (np.random.default_rng(0), lambda block, h: h * block.state.random()),
    "an older one of NumPy": lambda: (np.random.RandomState(0), lambda block, h: h * block.state.rand()),
}
ITERATORS: dict[str, Callable[[], Any]] = {
    "a count": lambda: itertools.count(1),
    "a cycle": lambda: itertools.cycle([1, 2, 3]),
    "a generator": lambda: (1 + number for number in range(9)),
    "an iterator of a list": lambda: iter([1, 2, 3]),
}
