"""Right without checkpoints; a recomputation reads, draws or counts something else."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import collections
import contextlib
import dataclasses
import itertools
import os
import random
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.gallery.users.authors.stacks import ROWS, WIDTH, Plain


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.change(self.lin(x)).tanh()

    def change(self, h):
        return h


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def built(model):
    return model, (torch.randn(ROWS, WIDTH),), lambda y: y.square().mean()


def three(middle):
    return built(Model(Plain(), middle, Plain()))


class Deep(Layer):
    depth = 0

    def change(self, h):
        return h * (1 + self.depth)


class Shared(nn.Module):
    """One block used three times, told its depth by an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Deep()])

    def forward(self, x):
        for depth in range(3):
            self.blocks[0].depth = depth
            x = self.blocks[0](x)
        return x


def shared_block_told_its_depth():
    return built(Shared())


class RunningScale(Layer):
    scale = 1.0

    def change(self, h):
        self.scale = 0.9 * self.scale + 0.1 * float(h.detach().abs().mean())
        return h / self.scale


def running_scale_as_a_float():
    return three(RunningScale())


class MoreDropout(Layer):
    p = 0.1

    def change(self, h):
        self.p = min(0.5, self.p + 0.1)
        return F.dropout(h, self.p, self.training)


def dropout_that_grows_by_call():
    return three(MoreDropout())


class ByEnvironment(Layer):
    def change(self, h):
        return h.sin() if os.environ.get("FUSED") else h


class SetsEnvironment(Model):
    def forward(self, x):
        os.environ["FUSED"] = "1"
        try:
            return super().forward(x)
        finally:
            del os.environ["FUSED"]


def environment_variable_for_forward_only():
    return built(SetsEnvironment(Plain(), ByEnvironment(), Plain()))


STEP = [0]


def alpha():
    return 1.0 / (1 + STEP[0] % 5)


class Warming(Layer):
    def change(self, h):
        return h * alpha()


class CountsGlobally(Model):
    def forward(self, x):
        y = super().forward(x)
        STEP[0] += 1
        return y


def global_step_behind_a_function():
    return built(CountsGlobally(Plain(), Warming(), Plain()))


LOCAL = threading.local()


class ThreadFlagged(Layer):
    def change(self, h):
        return h * 2 if getattr(LOCAL, "double", False) else h


class SetsThreadFlag(Model):
    def forward(self, x):
        LOCAL.double = True
        try:
            return super().forward(x)
        finally:
            LOCAL.double = False


def thread_local_flag():
    return built(SetsThreadFlag(Plain(), ThreadFlagged(), Plain()))


def gain_in_the_closure_of_a_hook():
    layer, calls = Layer(), 0

    def hook(_module, args):
        nonlocal calls
        calls += 1
        return (args[0] * (1 + 0.5 * (calls % 4)),)

    layer.lin.register_forward_pre_hook(hook)
    return three(layer)


class Cycling(Layer):
    def __init__(self):
        super().__init__()
        self.gains = itertools.cycle([0.5, 1.0, 2.0])

    def change(self, h):
        return h * next(self.gains)


def cycle_of_gains():
    return three(Cycling())


def list_in_the_closure_of_a_hook():
    layer, norms = Layer(), []
    layer.lin.register_forward_hook(lambda _m, _a, out: norms.append(float(out.detach().norm())))
    return three(layer)


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.random = random.Random(0)

    def forward(self, x):
        for place in self.random.sample(range(3), 3):
            x = self.parts[place](x).tanh()
        return x


def order_by_a_random_of_its_own():
    return three(Shuffled())


class Whitened(Layer):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def change(self, h):
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return (h - self.mean) * self.mean.exp()


def mean_in_a_plain_tensor():
    return three(Whitened())


class Freezing(Model):
    """Freezes a layer for the time of its forward, as alternating training does."""

    def forward(self, x):
        for each in self.blocks[1].lin.parameters():
            each.requires_grad_(False)
        y = super().forward(x)
        for each in self.blocks[1].lin.parameters():
            each.requires_grad_(True)
        return y


def layer_frozen_for_forward_only():
    return built(Freezing(Plain(), Layer(), Plain()))


class Losing(Layer):
    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def change(self, h):
        self.losses.append(h.square().mean().detach())
        return h


class Collecting(Model):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.blocks = nn.ModuleList([Losing(self.losses), Losing(self.losses)])

    def forward(self, x):
        self.losses.clear()
        return super().forward(x)


def losses_collected_in_a_shared_list():
    return built(Collecting())


class Windowed(Layer):
    window = 2

    def change(self, h):
        return torch.cat([h[:, : self.window], 0.5 * h[:, self.window :]], 1)


class Growing(Model):
    def forward(self, x):
        y = super().forward(x)
        self.blocks[1].window = 2 + (self.blocks[1].window + 1) % 5
        return y


def window_grows_after_forward():
    return built(Growing(Plain(), Windowed(), Plain()))


class Tallied(Layer):
    def __init__(self):
        super().__init__()
        self.tally = collections.Counter()

    def change(self, h):
        self.tally.update((h > 0).sum(1).tolist())
        return h


def counter_of_active_units():
    return three(Tallied())


class Activated(Layer):
    def __init__(self):
        super().__init__()
        self.act = F.gelu

    def change(self, h):
        return self.act(h)


class SwapsActivation(Model):
    def forward(self, x):
        self.blocks[1].act = torch.sin
        y = super().forward(x)
        self.blocks[1].act = F.gelu
        return y


def activation_swapped_for_forward():
    return built(SwapsActivation(Plain(), Activated(), Plain()))


SCALES = [1.0]


@contextlib.contextmanager
def scaled(value):
    SCALES.append(value)
    try:
        yield
    finally:
        SCALES.pop()


class TopOfStack(Layer):
    def change(self, h):
        return h * SCALES[-1]


class Pushes(Model):
    def forward(self, x):
        with scaled(3.0):
            return super().forward(x)


def top_of_a_global_stack():
    return built(Pushes(Plain(), TopOfStack(), Plain()))


SEEN = set()


class Once(Layer):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def change(self, h):
        if self.name in SEEN:
            return h
        SEEN.add(self.name)
        return 2 * h


class Forgets(Model):
    def forward(self, x):
        SEEN.clear()
        return super().forward(x)


def names_seen_in_this_forward():
    return built(Forgets(Once("a"), Once("b")))


class DrawsFromArgument(Layer):
    def forward(self, x, generator):
        return x + self.lin(x * torch.rand(x.shape, generator=generator)).tanh()


class HandsGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([DrawsFromArgument(), DrawsFromArgument()])

    def forward(self, x):
        generator = torch.Generator().manual_seed(7)
        for block in self.blocks:
            x = block(x, generator)
        return x


def generator_as_an_argument():
    return built(HandsGenerator())


@dataclasses.dataclass
class State:
    count: int = 0


class Stateful(Layer):
    def forward(self, x, state):
        state.count += 1
        return x + (self.lin(x) / state.count).tanh()


class HandsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Stateful(), Stateful()])

    def forward(self, x):
        state = State()
        for block in self.blocks:
            x = block(x, state)
        return x


def dataclass_argument_that_counts():
    return built(HandsState())


class Noised(Layer):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def change(self, h):
        return h * torch.rand(h.shape, generator=self.generator)


class Seeding(Model):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.blocks = nn.ModuleList([Noised(self.generator), Noised(self.generator)])

    def forward(self, x):
        self.generator.manual_seed(1)
        return super().forward(x)


def generator_seeded_by_each_forward():
    return built(Seeding())


class Context:
    mask = None


class Masked(Layer):
    def __init__(self, context):
        super().__init__()
        self.context = context

    def change(self, h):
        return h if self.context.mask is None else h * self.context.mask


class Masking(Model):
    def __init__(self):
        super().__init__()
        self.context = Context()
        self.blocks = nn.ModuleList([Masked(self.context), Plain()])

    def forward(self, x):
        self.context.mask = (x > 0).float()
        y = super().forward(x)
        self.context.mask = None
        return y


def mask_on_a_context_cleared_after_forward():
    return built(Masking())
