"""Right without checkpoints; with them a recomputation reads, draws or counts something else."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import collections
import contextvars
import enum
import functools
import itertools
import random

import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.gallery.users.outsider.setups import (
    ROWS,
    WIDTH,
    Block,
    Net,
    Setup,
    checkpointed,
    reentrant,
    without_rng,
)

SETUPS = []


def wrong(culprit, variant=checkpointed):
    def kept(make):
        SETUPS.append(Setup(make=make, variant=variant, verdict="differs", culprit=culprit))
        return make

    return kept


class Dropped(Block):
    def change(self, h):
        return F.dropout(h, 0.3, self.training)


@wrong("bernoulli|random numbers", variant=without_rng)
def dropout_without_rng():
    return Net(Dropped(), Dropped())


class Jitters(Block):
    def change(self, h):
        return h * (1 + torch.randn(len(h), 1))


@wrong("randn|normal|random numbers", variant=functools.partial(without_rng))
def noise_without_rng():
    return Net(Block(), Jitters())


class ReadsCache(Block):
    def __init__(self):
        super().__init__()
        self.cache = torch.linspace(0, 1, WIDTH)

    def change(self, h):
        return h + self.cache


class ClearsCache(Net):
    def run(self, x):
        x = super().run(x)
        self.blocks[0].cache.zero_()
        return x

    def forward(self, x):
        self.blocks[0].cache.copy_(torch.linspace(0, 1, WIDTH))
        return super().forward(x)


@wrong(r"blocks\.0\.cache")
def cached_tensor_cleared():
    return ClearsCache(ReadsCache(), Block())


class HostScratch(Block):
    """Offsets are taken from one host array that all blocks of the model write."""

    def __init__(self, scratch):
        super().__init__()
        self.scratch = scratch

    def change(self, h):
        return h + torch.from_numpy(self.scratch.copy())


class FillsScratch(Net):
    def run(self, x):
        for place, block in enumerate(self.blocks):
            block.scratch[:] = place
            x = block(x)
        return x


@wrong("scratch")
def host_array_of_all_blocks():
    scratch = numpy.zeros(WIDTH, dtype=numpy.float32)
    return FillsScratch(HostScratch(scratch), HostScratch(scratch))


class Progress:
    __slots__ = ("step",)

    def __init__(self):
        self.step = 0


class BranchesOnStep(Block):
    def __init__(self, progress):
        super().__init__()
        self.progress = progress

    def change(self, h):
        return h * 2 if self.progress.step % 2 else h.cos()


class Steps(Net):
    def __init__(self, progress, *blocks):
        super().__init__(*blocks)
        self.progress = progress

    def run(self, x):
        x = super().run(x)
        self.progress.step += 1
        return x


@wrong(r"progress\.step")
def branch_on_a_step_in_slots():
    progress = Progress()
    return Steps(progress, Block(), BranchesOnStep(progress))


TEMPERATURE = 1.0


class Tempered(Block):
    def change(self, h):
        return h / TEMPERATURE


class SetsTemperature(Net):
    def run(self, x):
        global TEMPERATURE
        TEMPERATURE = 0.5
        x = super().run(x)
        TEMPERATURE = 1.0
        return x


@wrong("TEMPERATURE")
def global_during_forward():
    return SetsTemperature(Block(), Tempered())


class Activated(Block):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def change(self, h):
        return self.act(h)


@wrong("count|act")
def closure_that_counts():
    count = 0

    def act(h):
        nonlocal count
        count += 1
        return h * (1 + count % 3)

    return Net(Block(), Activated(act))


class Cycles(Block):
    def __init__(self):
        super().__init__()
        self.gains = itertools.cycle([0.5, 1.0, 2.0])

    def change(self, h):
        return h * next(self.gains)


@wrong("gains")
def iterator_consumed():
    return Net(Block(), Cycles())


def schedule():
    gain = 1.0
    while True:
        yield gain
        gain *= 0.9


class Scheduled(Block):
    def __init__(self):
        super().__init__()
        self.schedule = schedule()

    def change(self, h):
        return h * next(self.schedule)


@wrong("schedule")
def python_generator_consumed():
    return Net(Block(), Scheduled())


class RandomGain(Block):
    def change(self, h):
        return h * random.uniform(0.5, 1.5)


@wrong("random|Python's")
def python_random_in_the_block():
    return Net(Block(), RandomGain())


class Grows(Block):
    def __init__(self):
        super().__init__()
        self.window = []

    def change(self, h):
        self.window.append(float(h.detach().abs().mean()))
        return h * len(self.window)


@wrong("window")
def attribute_that_grows():
    return Net(Block(), Grows())


class Recent(Block):
    def __init__(self):
        super().__init__()
        self.history = collections.deque([1.0], maxlen=4)

    def change(self, h):
        h = h / (sum(self.history) / len(self.history))
        self.history.append(float(h.detach().norm()))
        return h


@wrong("history")
def deque_of_norms():
    return Net(Block(), Recent())


class OwnGenerator(Block):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def change(self, h):
        return h * torch.rand(len(h), 1, generator=self.generator)


@wrong("generator")
def generator_of_its_own():
    return Net(Block(), OwnGenerator())


class NumpyGenerator(Block):
    def __init__(self):
        super().__init__()
        self.rng = numpy.random.default_rng(0)

    def change(self, h):
        return h * float(self.rng.uniform(0.5, 1.5))


@wrong("rng")
def numpy_generator_of_its_own():
    return Net(Block(), NumpyGenerator())


class Ramp:
    """A forward hook with a counter."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, inputs, output):
        self.calls += 1
        return output * min(1.0, self.calls / 10)


@wrong("calls")
def hook_that_counts():
    block = Block()
    block.lin.register_forward_hook(Ramp())
    return Net(Block(), block)


class SavesNoInput(Block):
    def forward(self, x):
        return self.lin((x + 1).sin()).tanh()


class Reuses(Net):
    """The input of a block is scratch memory for whoever comes next."""

    def run(self, x):
        for block in self.blocks:
            y = block(x)
            x.data.zero_()
            x = y
        return x


@wrong("input")
def input_cleared_after_the_call():
    return Reuses(SavesNoInput(), SavesNoInput())


class Pops(Block):
    def forward(self, x, shifts):
        return x + (self.lin(x) + shifts.pop()).sin()


class GivesAList(Net):
    def run(self, x):
        shifts = [torch.full((WIDTH,), float(place)) for place in range(4)]
        for block in self.blocks:
            x = block(x, shifts)
        return x


@wrong("input|argument|shifts")
def list_argument_popped():
    return GivesAList(Pops(), Pops())


class ReadsTable(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.register_buffer("spare", torch.linspace(1, 2, WIDTH))

    def change(self, h):
        return h + self.table


class Swaps(Net):
    def run(self, x):
        x = super().run(x)
        block = self.blocks[0]
        block.table, block.spare = block.spare, block.table
        return x


@wrong("table")
def buffers_swapped():
    return Swaps(ReadsTable(), Block())


class Adapted(Block):
    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("mine", "yours")})
        self.active = "mine"

    def change(self, h):
        return h + self.adapters[self.active](h)


@wrong("active")
def adapter_of_a_hook():
    net = Net(Block(), Adapted())
    net.register_forward_pre_hook(lambda model, _: setattr(model.blocks[1], "active", "yours"))
    net.register_forward_hook(lambda model, _, __: setattr(model.blocks[1], "active", "mine"))
    return net


SCALE = contextvars.ContextVar("scale", default=1.0)


class InContext(Block):
    def change(self, h):
        return h * SCALE.get()


class SetsContext(Net):
    def run(self, x):
        token = SCALE.set(3.0)
        try:
            return super().run(x)
        finally:
            SCALE.reset(token)


@wrong("(?i)scale")
def context_variable_during_forward():
    return SetsContext(Block(), InContext())


class KnowsDepth(Block):
    depth = 0

    def change(self, h):
        return h * (1 + type(self).depth)


class TellsDepth(Net):
    def run(self, x):
        for place, block in enumerate(self.blocks):
            KnowsDepth.depth = place
            x = block(x)
        return x


@wrong("depth")
def attribute_of_the_class():
    return TellsDepth(KnowsDepth(), KnowsDepth())


class ChangesActivation(Net):
    def run(self, x):
        self.blocks[1].act = functools.partial(F.leaky_relu, negative_slope=0.1)
        x = super().run(x)
        self.blocks[1].act = functools.partial(F.leaky_relu, negative_slope=0.9)
        return x


@wrong("act")
def partial_replaced():
    return ChangesActivation(Block(), Activated(F.relu))


class Cooling(Block):
    def __init__(self):
        super().__init__()
        self._tau = 1.0

    @property
    def tau(self):
        return max(self._tau, 0.1)

    def change(self, h):
        return h / self.tau


class Cools(Net):
    def run(self, x):
        x = super().run(x)
        self.blocks[1]._tau *= 0.8
        return x


@wrong("_tau")
def number_behind_a_property():
    return Cools(Block(), Cooling())


class Phase(enum.Enum):
    A = 1
    B = 2


class Alternates(Block):
    def __init__(self):
        super().__init__()
        self.phase = Phase.A

    def change(self, h):
        self.phase = Phase.B if self.phase is Phase.A else Phase.A
        return h * 2 if self.phase is Phase.A else h.cos()


@wrong("phase")
def phase_that_alternates():
    return Net(Block(), Alternates())


class AsksForGradients(Block):
    def change(self, h):
        return h * 2 if h.requires_grad else h


@wrong("outputs?|grad", variant=reentrant)
def reentrant_forward_without_gradients():
    return Net(Block(), AsksForGradients())


class Timed(Block):
    def __init__(self):
        super().__init__()
        self.time = torch.zeros(())

    def change(self, h):
        self.time = self.time + 1
        return h * (1 + self.time.sin())


@wrong("time")
def step_in_a_plain_tensor():
    return Net(Block(), Timed())


class TwoWays(Block):
    def __init__(self):
        super().__init__()
        self.way = self.slow

    def change(self, h):
        return self.way(h)

    def slow(self, h):
        return h.cos()

    def fast(self, h):
        return h * 2


class SwitchesWay(Net):
    def run(self, x):
        block = self.blocks[1]
        block.way = block.slow
        x = super().run(x)
        block.way = block.fast
        return x


@wrong("way")
def bound_method_switched():
    return SwitchesWay(Block(), TwoWays())


def warmed(h):
    warmed.calls += 1
    return h * min(1.0, warmed.calls / 20)


warmed.calls = 0


class Warmed(Block):
    def change(self, h):
        return warmed(h)


@wrong("calls|warmed")
def attribute_of_a_function():
    return Net(Block(), Warmed())


class Logged(Block):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def change(self, h):
        return h * (1 + len(self.log))


class Logs(Net):
    def __init__(self, log, *blocks):
        super().__init__(*blocks)
        self.log = log

    def run(self, x):
        x = super().run(x)
        self.log.append("step")
        return x


@wrong("log")
def length_of_a_log():
    log = []
    return Logs(log, Block(), Logged(log))
