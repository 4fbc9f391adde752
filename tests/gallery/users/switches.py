"""What a block reads is another thing when backward recomputes: modes, globals, arguments, aliases."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.gallery.parts import (
    WIDTH,
    Chain,
    Example,
    Layer,
    Net,
    example,
    linear,
)
from tests.gallery.users.held import Adapted


class Tempered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Any) -> Any:
        return x * (self.linear(x) / self.temperature).softmax(-1)


class TemperedModel(Chain):
    """Sets a temperature for the time of its forward."""

    def __init__(self) -> None:
        super().__init__(Layer(), Tempered(), Layer())

    @contextlib.contextmanager
    def temperature(self, value: Any) -> Iterator[None]:
        self.blocks[1].temperature = value
        try:
            yield
        finally:
            self.blocks[1].temperature = 1.0

    def forward(self, x: Any) -> Any:
        with self.temperature(3.0):
            for block in self.blocks:
                x = block(x)
        return x


def attribute_set_for_forward_only() -> Example:
    """The model sets a temperature on a block for the time of its forward; recomputation runs after it was
    set back."""
    return example(TemperedModel(), torch.randn(4, WIDTH))


SETTINGS = {"low_precision": False}


@contextlib.contextmanager
def low_precision() -> Iterator[None]:
    SETTINGS["low_precision"] = True
    try:
        yield
    finally:
        SETTINGS["low_precision"] = False


class GlobalReader(Layer):
    def forward(self, x: Any) -> Any:
        h = self.linear(x)
        if SETTINGS["low_precision"]:
            with torch.no_grad():
                error = (h * 8).round() / 8 - h
            h = h + error
        return x + torch.tanh(h)


class GlobalModel(Chain):
    def forward(self, x: Any) -> Any:
        with low_precision():
            return super().forward(x)


def global_setting_for_forward_only() -> Example:
    """A dict of the module is switched by a context manager around forward only, and a block asks it again
    in backward."""
    return example(GlobalModel(Layer(), GlobalReader(), Layer(), Layer()), torch.randn(4, WIDTH))


class Frequencies(Layer):
    def forward(self, x: Any) -> Any:
        wave = torch.exp(torch.linspace(0, 9, WIDTH)).sin().to(x.dtype)
        return x + torch.tanh(self.linear(x * wave))


class DefaultDtypeModel(Net):
    """The default dtype is double while forward runs, so a constant is rounded otherwise in recomputation;
    only last bits of gradients tell."""

    middle = Frequencies

    def forward(self, x: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return super().forward(x)
        finally:
            torch.set_default_dtype(torch.float32)


class Slope(Layer):
    """A leaky activation that is steeper in training."""

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(functional.leaky_relu(self.linear(x), 0.3 if self.training else 0.01))


class TrainsInForward(Chain):
    def forward(self, x: Any) -> Any:
        self.train()
        return super().forward(x)


def loss_leaves_eval_mode() -> Example:
    """The loss calls eval() for a metric, so recomputation takes the slope of evaluation."""
    model = TrainsInForward(Layer(), Slope(), Layer())

    def loss(y: Any) -> Any:
        model.eval()  # for the accuracy below; train() comes back in the next forward
        accuracy = (y.detach() > 0).float().mean()
        return y.square().mean() + 0 * accuracy

    return model, (torch.randn(4, WIDTH),), loss


class PhaseBlock(Layer):
    def __init__(self, phase: Any) -> None:
        super().__init__()
        self.phase = phase

    def forward(self, x: Any) -> Any:
        bias = 0.5 if self.phase["name"] == "forward" else 0.0
        return x + torch.tanh(self.linear(x) + bias)


class PhaseModel(nn.Module):
    """A gradient hook at the head tells a profiler that backward has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = {"name": "forward"}
        self.blocks = nn.ModuleList([Layer(), Layer(), PhaseBlock(self.phase)])

    def forward(self, x: Any) -> Any:
        self.phase["name"] = "forward"
        for block in self.blocks:
            x = block(x)
        x.register_hook(self.backward_begins)
        return x

    def backward_begins(self, _grad: Any) -> None:
        self.phase["name"] = "backward"


def gradient_hook_changes_phase() -> Example:
    """A gradient hook at the head marks that backward has begun, and a block reads the mark in
    recomputation."""
    return example(PhaseModel(), torch.randn(4, WIDTH))


class NoisyWeights(Chain):
    """Variational weights: noise is added for forward and taken away at its end."""

    def forward(self, x: Any) -> Any:
        clean = [p.detach().clone() for p in self.blocks.parameters()]
        with torch.no_grad():
            for p in self.blocks.parameters():
                p.data = p.data + 0.1 * torch.randn_like(p)
        x = super().forward(x)
        for p, c in zip(self.blocks.parameters(), clean, strict=True):
            p.data = c
        return x


def weight_noise_taken_away() -> Example:
    """Noise is on the weights while forward runs and gone when backward recomputes."""
    return example(NoisyWeights(*(Layer() for _ in range(3))), torch.randn(4, WIDTH))


class FromBank(Layer):
    def __init__(self, bank: Any) -> None:
        super().__init__()
        self.bank = [bank]

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(x + self.bank[0].mean(0)))


class Moco(nn.Module):
    """A queue of features that the model fills once its blocks have read it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Any
        self.register_buffer("queue", torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList([Layer(), Layer(), FromBank(self.queue)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        self.queue[: x.shape[0]] = x.detach()
        return x


def feature_queue_filled_after_blocks() -> Example:
    """The model fills a queue after its blocks have run, and the block that reads the queue reads the new
    one in recomputation."""
    return example(Moco(), torch.randn(4, WIDTH))


class DenseBlock(Layer):
    def forward(self, features: Any) -> Any:
        y = torch.tanh(self.linear(sum(features)))
        features.append(y)
        return y


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = linear()
        self.blocks = nn.ModuleList(DenseBlock() for _ in range(3))

    def forward(self, x: Any) -> Any:
        features = [self.stem(x)]
        for block in self.blocks:
            y = block(features)
        return y


def list_argument_grows() -> Example:
    """Blocks append to the list they are given, which is longer when they run again."""
    return example(DenseNet(), torch.randn(4, WIDTH))


class Positioned(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Embedding(8, WIDTH)

    def forward(self, x: Any, info: Any) -> Any:  # type: ignore[override]  # it takes more
        y = x + torch.tanh(self.linear(x + self.depth(torch.tensor(info["layer"]))))
        info["layer"] += 1
        return y


class PositionedModel(Chain):
    def __init__(self) -> None:
        super().__init__(*(Positioned() for _ in range(3)))

    def forward(self, x: Any) -> Any:
        info = {"layer": 0}
        for block in self.blocks:
            x = block(x, info)
        return x


def dict_argument_counts_layers() -> Example:
    """Blocks raise a number in the dict they are given, so in recomputation each looks up another depth."""
    return example(PositionedModel(), torch.randn(4, WIDTH))


class InplaceResidual(nn.Module):
    """A block shifts its input in place, legally in plain torch; torch's checkpoint has saved that input
    and raises when it wants to recompute from it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Any) -> Any:
        x += self.shift
        return x + torch.tanh(self.linear(x.bfloat16())).float()


class InDict(Layer):
    """Takes a dict and gives a new one; one of them shifts the tensor that it finds there, in place."""

    def __init__(self, shift: Any) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.3)) if shift else None

    def forward(self, batch: Any) -> Any:
        hidden = batch["hidden"]
        if self.shift is not None:
            hidden += self.shift
        return {**batch, "hidden": hidden + torch.tanh(self.linear(hidden))}


class DictStack(Chain):
    def forward(self, x: Any) -> Any:
        return super().forward({"hidden": x * 1.0})["hidden"]


def tensor_in_dict_changed_in_place() -> Example:
    """The same in-place shift on a tensor inside of a dict, of which torch's checkpoint keeps only a
    reference: recomputation shifts again, in silence."""
    return example(DictStack(InDict(False), InDict(True), InDict(False)), torch.randn(4, WIDTH))


class ClampsSaved(Layer):
    """A saved activation is changed through .data afterwards: plain backward sees the change, a copy in
    host memory does not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        h = self.linear(x)
        y = h * self.gate
        h.data.clamp_(-0.1, 0.1)  # "the gradient of the gate shall see clamped values"
        return x + y


class ScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.T, (x.T @ grad) * getattr(x, "scale", 1.0)


class Loaded(nn.Module):
    """A custom backward reads a Python attribute of a saved tensor, which the recomputed tensor does not
    have."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(x)
        x.scale = 0.5  # travels with the tensor, as in many quantisation libraries
        return ScaledMatmul.apply(x, self.w)


class LeafMode(Layer):
    """Blocks ask whether gradients are recorded, and recomputation records as forward did."""

    def forward(self, x: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            return x + torch.tanh(self.linear(x).mul_(2))
        return x + torch.tanh(self.linear(x).half()).float()


class AddsPositions(Chain):
    """Right: the model changes a block's output in place, before the next block reads it."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.position = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
            x += self.position
        return x


def output_changed_in_place_by_model() -> Example:
    """The model adds to a block's output in place before the next block reads it; no region has to see the
    older value."""
    return example(AddsPositions(*(Layer() for _ in range(3))), torch.randn(4, WIDTH))


class ByEnvironment(Layer):
    def change(self, h: Any) -> Any:
        return h.sin() if os.environ.get("FUSED") else h


class SetsEnvironment(Net):
    middle = ByEnvironment

    def forward(self, x: Any) -> Any:
        os.environ["FUSED"] = "1"
        try:
            return super().forward(x)
        finally:
            del os.environ["FUSED"]


LOCAL = threading.local()


class ThreadFlagged(Layer):
    def change(self, h: Any) -> Any:
        return h * 2 if getattr(LOCAL, "double", False) else h


class SetsThreadFlag(Net):
    middle = ThreadFlagged

    def forward(self, x: Any) -> Any:
        LOCAL.double = True
        try:
            return super().forward(x)
        finally:
            LOCAL.double = False


class Freezing(Net):
    """Freezes a layer for the time of its forward, as alternating training does."""

    def forward(self, x: Any) -> Any:
        for each in self.blocks[1].linear.parameters():
            each.requires_grad_(requires_grad=False)
        y = super().forward(x)
        for each in self.blocks[1].linear.parameters():
            each.requires_grad_(requires_grad=True)
        return y


class Windowed(Layer):
    window = 2

    def change(self, h: Any) -> Any:
        return torch.cat([h[:, : self.window], 0.5 * h[:, self.window :]], 1)


class Growing(Net):
    middle = Windowed

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        self.blocks[1].window = 2 + (self.blocks[1].window + 1) % 5
        return y


class Activated(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.act = functional.gelu

    def change(self, h: Any) -> Any:
        return self.act(h)


class SwapsActivation(Net):
    middle = Activated

    def forward(self, x: Any) -> Any:
        self.blocks[1].act = torch.sin
        y = super().forward(x)
        self.blocks[1].act = functional.gelu
        return y


SCALES = [1.0]


@contextlib.contextmanager
def scaled(value: Any) -> Iterator[None]:
    SCALES.append(value)
    try:
        yield
    finally:
        SCALES.pop()


class TopOfStack(Layer):
    def change(self, h: Any) -> Any:
        return h * SCALES[-1]


class Pushes(Net):
    middle = TopOfStack

    def forward(self, x: Any) -> Any:
        with scaled(3.0):
            return super().forward(x)


SEEN: set[str] = set()


class Once(Layer):
    def __init__(self, name: Any) -> None:
        super().__init__()
        self.name = name

    def change(self, h: Any) -> Any:
        if self.name in SEEN:
            return h
        SEEN.add(self.name)
        return 2 * h


class Forgets(Net):
    def forward(self, x: Any) -> Any:
        SEEN.clear()
        return super().forward(x)


def names_seen_in_this_forward() -> Example:
    """Names seen in a forward are in a global set, so recomputation takes the other branch."""
    return example(Forgets(Once("a"), Once("b")))


@dataclasses.dataclass
class State:
    count: int = 0


class Stateful(Layer):
    def forward(self, x: Any, state: Any) -> Any:  # type: ignore[override]  # it takes more
        state.count += 1
        return x + (self.linear(x) / state.count).tanh()


class HandsState(Chain):
    def __init__(self) -> None:
        super().__init__(Stateful(), Stateful())

    def forward(self, x: Any) -> Any:
        state = State()
        for block in self.blocks:
            x = block(x, state)
        return x


def dataclass_argument_that_counts() -> Example:
    """Blocks raise a number of the dataclass that they are given."""
    return example(HandsState())


class Context:
    mask: Any = None


class Masked(Layer):
    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context = context

    def change(self, h: Any) -> Any:
        return h if self.context.mask is None else h * self.context.mask


class Masking(Net):
    def __init__(self) -> None:
        super().__init__()
        self.context = Context()
        self.blocks = nn.ModuleList([Masked(self.context), Layer()])

    def forward(self, x: Any) -> Any:
        self.context.mask = (x > 0).float()
        y = super().forward(x)
        self.context.mask = None
        return y


def mask_on_a_context_cleared_after_forward() -> Example:
    """A mask on a context is gone when backward recomputes: fewer tensors are saved."""
    return example(Masking())


class ReadsCache(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.linspace(0, 1, WIDTH)

    def change(self, h: Any) -> Any:
        return h + self.cache


class ClearsCache(Net):
    def run(self, x: Any) -> Any:
        x = super().run(x)
        self.blocks[0].cache.zero_()
        return x

    def forward(self, x: Any) -> Any:
        self.blocks[0].cache.copy_(torch.linspace(0, 1, WIDTH))
        return super().forward(x)


def cached_tensor_cleared() -> Example:
    """A tensor of a block is filled before its forward and cleared after it."""
    return example(ClearsCache(ReadsCache(), Layer()))


class HostScratch(Layer):
    """Offsets are taken from one host array that all blocks of the model write."""

    def __init__(self, scratch: Any) -> None:
        super().__init__()
        self.scratch = scratch

    def change(self, h: Any) -> Any:
        return h + torch.from_numpy(self.scratch.copy())


class FillsScratch(Net):
    def run(self, x: Any) -> Any:
        for place, block in enumerate(self.blocks):
            block.scratch[:] = place
            x = block(x)
        return x


def host_array_of_all_blocks() -> Example:
    """All blocks read one host array, which the model fills for each of them."""
    scratch = np.zeros(WIDTH, dtype=np.float32)
    return example(FillsScratch(HostScratch(scratch), HostScratch(scratch)))


TEMPERATURE = 1.0


class GloballyTempered(Layer):
    def change(self, h: Any) -> Any:
        return h / TEMPERATURE


class SetsTemperature(Net):
    middle = GloballyTempered

    def run(self, x: Any) -> Any:
        global TEMPERATURE  # noqa: PLW0603 (the defect)
        TEMPERATURE = 0.5
        x = super().run(x)
        TEMPERATURE = 1.0
        return x


class SavesNoInput(Layer):
    def forward(self, x: Any) -> Any:
        return self.linear((x + 1).sin()).tanh()


class Reuses(Net):
    """The input of a block is scratch memory for whoever comes next."""

    def run(self, x: Any) -> Any:
        for block in self.blocks:
            y = block(x)
            x.data.zero_()
            x = y
        return x


def input_cleared_after_the_call() -> Example:
    """The input of a block is scratch memory for whoever comes next."""
    return example(Reuses(SavesNoInput(), SavesNoInput()))


class Pops(Layer):
    def forward(self, x: Any, shifts: Any) -> Any:  # type: ignore[override]  # it takes more
        return x + (self.linear(x) + shifts.pop()).sin()


class GivesAList(Net):
    def run(self, x: Any) -> Any:
        shifts = [torch.full((WIDTH,), float(place)) for place in range(4)]
        for block in self.blocks:
            x = block(x, shifts)
        return x


def list_argument_popped() -> Example:
    """Blocks pop tensors of a list that they are given; recomputation pops the next ones."""
    return example(GivesAList(Pops(), Pops()))


class ReadsTable(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.register_buffer("spare", torch.linspace(1, 2, WIDTH))

    def change(self, h: Any) -> Any:
        return h + self.table


class Swaps(Net):
    def run(self, x: Any) -> Any:
        x = super().run(x)
        block = self.blocks[0]
        block.table, block.spare = block.spare, block.table
        return x


def buffers_swapped() -> Example:
    """Two buffers of a block change places when forward ends."""
    return example(Swaps(ReadsTable(), Layer()))


def adapter_of_a_hook() -> Example:
    """Hooks of the model choose an adapter for the time of its forward."""
    net = Net(Layer(), Adapted())
    net.register_forward_pre_hook(lambda model, _: setattr(model.blocks[1], "active", "yours"))
    net.register_forward_hook(lambda model, _, __: setattr(model.blocks[1], "active", "mine"))
    return example(net)


SCALE = contextvars.ContextVar("scale", default=1.0)


class InContext(Layer):
    def change(self, h: Any) -> Any:
        return h * SCALE.get()


class SetsContext(Net):
    middle = InContext

    def run(self, x: Any) -> Any:
        token = SCALE.set(3.0)
        try:
            return super().run(x)
        finally:
            SCALE.reset(token)


class ChangesActivation(Net):
    def run(self, x: Any) -> Any:
        self.blocks[1].act = functools.partial(functional.leaky_relu, negative_slope=0.1)
        x = super().run(x)
        self.blocks[1].act = functools.partial(functional.leaky_relu, negative_slope=0.9)
        return x


def partial_replaced() -> Example:
    """A block has an activation with another slope once forward is over."""
    return example(ChangesActivation(Layer(), Activated()))


class Cooling(Layer):
    def __init__(self) -> None:
        super().__init__()
        self._tau = 1.0

    @property
    def tau(self) -> Any:
        return max(self._tau, 0.1)

    def change(self, h: Any) -> Any:
        return h / self.tau


class Cools(Net):
    middle = Cooling

    def run(self, x: Any) -> Any:
        x = super().run(x)
        self.blocks[1]._tau *= 0.8
        return x


class AsksForGradients(Layer):
    def change(self, h: Any) -> Any:
        return h * 2 if h.requires_grad else h


class TwoWays(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.way = self.slow

    def change(self, h: Any) -> Any:
        return self.way(h)

    def slow(self, h: Any) -> Any:
        return h.cos()

    def fast(self, h: Any) -> Any:
        return h * 2


class SwitchesWay(Net):
    middle = TwoWays

    def run(self, x: Any) -> Any:
        block = self.blocks[1]
        block.way = block.slow
        x = super().run(x)
        block.way = block.fast
        return x
