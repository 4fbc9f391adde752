"""Wrong under recomputation: forward counts, steps and anneals."""
# ruff: noqa: PGH004
# ruff: noqa
# mypy: ignore-errors

import itertools

import torch
import torch.nn as nn

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


class RoundRobin(nn.Module):
    """Experts take turns."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.turn = 0

    def forward(self, x):
        expert = self.experts[self.turn % 3]
        self.turn += 1
        return x + torch.tanh(expert(x))


def round_robin_experts():
    return Stack([Plain(), RoundRobin(), Plain(), Plain()]), (torch.randn(4, D),), mean_square


class Warmup(nn.Module):
    """A gate that opens over the first hundred forwards; the count is a buffer, so it is saved with the weights."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        gate = (self.seen / 100).clamp(max=1.0)
        return x + torch.tanh(self.lin(x) * (1 + gate))


def warmup_count_in_buffer():
    return Stack([Plain(), Plain(), Warmup(), Plain()]), (torch.randn(4, D),), mean_square


class Metered(nn.Module):
    """Counts tokens for the dashboard only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.long), persistent=False)
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        self.tokens_seen += x.shape[0]
        return x + torch.tanh(self.lin(x))


def token_meter_in_buffer():
    return Stack(Metered() for _ in range(4)), (torch.randn(4, D),), mean_square


class Dilated(nn.Module):
    """Cycles through dilations; an iterator holds the state, no counter does."""

    def __init__(self, cycle):
        super().__init__()
        self.dilations = itertools.cycle([1, 2, 4]) if cycle else itertools.repeat(1)
        self.weight = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x):
        d = next(self.dilations)
        return x + torch.nn.functional.conv1d(x, self.weight, padding=d, dilation=d).tanh()


def iterator_of_dilations():
    return Stack([Dilated(True), Dilated(False), Dilated(False)]), (torch.randn(2, 1, 16),), mean_square


class Annealed(nn.Module):
    """Each forward cools a temperature; a pre-hook of an inner module does it."""

    def __init__(self, rate):
        super().__init__()
        self.tau = 1.0
        self.rate = rate
        self.score = nn.Linear(D, D)
        self.score.register_forward_pre_hook(self.cool)

    def cool(self, module, args):
        self.tau *= self.rate

    def forward(self, x):
        return x * (self.score(x) / self.tau).softmax(-1)


def temperature_cooled_by_inner_hook():
    return Stack([Annealed(1.0), Annealed(0.9), Annealed(1.0)]), (torch.randn(4, D),), mean_square


class Curriculum(nn.Module):
    """The parent counts, after its blocks have run; one of them reads the count."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self.blocks = nn.ModuleList([Plain(), Plain(), Windowed(self), Plain()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.step += 1
        return x


class Windowed(nn.Module):
    def __init__(self, parent):
        super().__init__()
        self.read = lambda: parent.step
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        window = torch.arange(D) < 2 + self.read()
        return x + torch.tanh(self.lin(x * window))


def parent_counts_after_blocks():
    return Curriculum(), (torch.randn(4, D),), mean_square


class CallsOfTheClass(nn.Module):
    """The count belongs to the class, so that all layers share one schedule."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        type(self).calls += 1
        return x + torch.tanh(self.lin(x) / type(self).calls)


def class_attribute_schedule():
    CallsOfTheClass.calls = 0
    return Stack(CallsOfTheClass() for _ in range(3)), (torch.randn(4, D),), mean_square


class Usage(nn.Module):
    """Counts its calls for a log. Nobody reads it in forward."""

    def __init__(self):
        super().__init__()
        self.forwards = 0
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        self.forwards += 1
        return x + torch.tanh(self.lin(x))


class LearnsFromUsage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Plain(), Usage(), Plain()])

    def forward(self, x):
        sharpness = 1 + self.blocks[1].forwards  # read before this forward counts
        for block in self.blocks:
            x = block(x)
        return x * sharpness


def count_read_by_next_step():
    return LearnsFromUsage(), (torch.randn(4, D),), mean_square


class UnfreezeByStep(nn.Module):
    """Right: counts and unfreezes outside of the blocks, before they run."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self.blocks = nn.ModuleList(Plain() for _ in range(4))
        self.blocks.requires_grad_(False)

    def forward(self, x):
        self.step += 1
        for i, block in enumerate(self.blocks):
            block.requires_grad_(len(self.blocks) - i <= self.step)
            x = block(x) * min(1.0, self.step / 10)
        return x


def progressive_unfreezing():
    return UnfreezeByStep(), (torch.randn(4, D),), mean_square
