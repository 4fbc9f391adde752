"""Hooks and side channels: of gradients, modules, state dicts, and lists that a loss reads."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    between,
    example,
    linear,
)


class ClippedBlock(Layer):
    """Gradient hooks on parameters and on an activation inside of the block; those of recomputed tensors
    are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))

    def forward(self, x: Any) -> Any:
        h = self.linear(x)
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm().clamp(min=0.1))
        return x + torch.tanh(h)


def module_backward_hooks() -> Example:
    """Full backward hooks on inner modules and forward hooks on blocks change values, but keep no state."""
    model = Chain(*(nn.Sequential(linear(), nn.Sigmoid()) for _ in range(3)))
    for block in model.blocks:
        block[0].register_full_backward_hook(
            lambda _m, gi, _go: tuple(None if g is None else 2 * g for g in gi)
        )
        block.register_forward_hook(lambda _m, _a, out: out * 1.5)
    return example(model, torch.randn(4, WIDTH))


class Renamed(Chain):
    """Old files of weights call the blocks layers: hooks rename on the way out and in."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.register_buffer("shift", torch.ones(WIDTH))
        self._register_state_dict_hook(self.out)
        self.register_load_state_dict_pre_hook(self.back)

    @staticmethod
    def out(_module: Any, state: Any, *_: Any) -> None:
        for key in list(state):
            state[key.replace("blocks.", "layers.")] = state.pop(key)

    @staticmethod
    def back(_module: Any, state: Any, *_: Any) -> None:
        for key in list(state):
            state[key.replace("layers.", "blocks.")] = state.pop(key)

    def get_extra_state(self) -> Any:
        return {"format": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state["format"] == 2

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.shift


def state_dict_hooks() -> Example:
    """State-dict hooks rename keys on the way out and in, and there is extra state; training never asks."""
    return example(Renamed(*(Layer() for _ in range(3))), torch.randn(4, WIDTH))


class Balanced(nn.Module):
    """A soft mixture that leaves its load-balancing loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: Any) -> Any:
        p = self.gate(x).softmax(-1)
        self.aux = p.mean(0).square().sum()
        return x + torch.tanh(
            sum((p[:, i, None] * e(x) for i, e in enumerate(self.experts)), torch.zeros(()))
        )


def auxiliary_loss_in_attribute() -> Example:
    """Each block leaves an auxiliary loss in an attribute that the loss reads before backward overwrites
    it."""
    model = Chain(*(Balanced() for _ in range(3)))
    return (
        model,
        (torch.randn(4, WIDTH),),
        lambda y: y.square().mean() + 0.1 * sum(b.aux for b in model.blocks),
    )


def features_cleared_by_loss() -> Example:
    """Inner hooks collect features and the loss empties the list, so recomputation leaves features of a
    freed graph for the loss of the next step, whose backward raises."""
    model = Chain(*(Layer() for _ in range(3)))
    features: list[Any] = []
    for block in model.blocks:
        block.linear.register_forward_hook(lambda _m, _a, out: features.append(out))

    def loss(y: Any) -> Any:
        penalty = sum(f.abs().mean() for f in features)
        features.clear()
        return y.square().mean() + 0.1 * penalty

    return model, (torch.randn(4, WIDTH),), loss


def features_cleared_before_forward() -> Example:
    """The same features, kept by index and cleared when a forward begins."""
    model = Chain(*(Layer() for _ in range(3)))
    features: dict[int, Any] = {}
    for i, block in enumerate(model.blocks):
        block.linear.register_forward_hook(lambda _m, _a, out, i=i: features.__setitem__(i, out))
    model.register_forward_pre_hook(lambda _m, _a: features.clear())

    def loss(y: Any) -> Any:
        return y.square().mean() + 0.1 * sum(f.abs().mean() for f in features.values())

    return model, (torch.randn(4, WIDTH),), loss


class Surprise(Layer):
    """A backward hook counts and forward reads the count; in one backward a module's hook comes after its
    recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(self.passed)
        self.passes = 0

    def passed(self, *_: Any) -> None:
        self.passes += 1

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(x)) / (1 + self.passes)


def legacy_weight_norm() -> Example:
    """The deprecated weight_norm computes the weight into an attribute in a pre-hook, from the same
    parameters each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = [nn.Sequential(nn.utils.weight_norm(linear()), nn.ReLU6()) for _ in range(3)]
    return example(Chain(*blocks), torch.randn(4, WIDTH))


def constant_in_the_closure_of_a_hook() -> Example:
    """A hook scales by a tensor that it encloses."""
    layer, gain = Layer(), torch.full((WIDTH,), 1.5)
    layer.linear.register_forward_hook(lambda _m, _a, out: out * gain)
    return between(layer)


class ClipsGradients(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.clip = 1e-3

    def change(self, h: Any) -> Any:
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-self.clip, self.clip))
        return h


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: Any) -> Any:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -ctx.module.reversal * gradient, None


class Adversarial(Layer):
    reversal = 0.3

    def change(self, h: Any) -> Any:
        return Reversed.apply(h, self)
