"""Forward counts, steps and anneals, and a recomputation does so once more."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.gallery.parts import WIDTH, Chain, Example, Layer, Net, example, linear

_GLOBALS = {"calls": 0}
_STEP = [0]


class Counting(Layer):
    """The output grows with the number of calls."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls))


class Tallying(Layer):
    """Counts its calls for a log; nothing reads the number."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


class GlobalCounting(Layer):
    """Reads and moves a number of the Python module, which the instances of a process share."""

    def forward(self, x: Tensor) -> Any:
        _GLOBALS["calls"] = (_GLOBALS["calls"] + 1) % 2
        return super().forward(x * (1 + _GLOBALS["calls"]))


class FunctionState(Layer):
    """A counter on the function itself, which the instances of a process share."""

    def forward(self, x: Tensor) -> Any:
        step: Any = FunctionState.forward
        step.calls = getattr(step, "calls", 0) ^ 1
        return super().forward(x * (1 + step.calls))


class RoundRobin(Layer):
    """Experts take turns by a counter in Python; recomputation asks the next expert, of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(linear() for _ in range(3))
        self.turn = 0

    def change(self, h: Tensor) -> Any:
        expert = self.experts[self.turn % 3]
        self.turn += 1
        return expert(h)


class Warmup(Layer):
    """A gate opens with a count in a buffer, which recomputation raises before it reads it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def change(self, h: Tensor) -> Any:
        self.seen += 1
        return h * (1 + (self.seen / 100).clamp(max=1.0))


class Metered(Layer):
    """A buffer counts tokens for a dashboard: gradients are right, the count of each block is doubled."""

    tokens_seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.long), persistent=False)

    def change(self, h: Tensor) -> Any:
        self.tokens_seen += h.shape[0]
        return h


def metered_in_every_block() -> Example:
    """The same in four blocks of five, of which a variant covers some."""
    return example(Net(*(Metered() for _ in range(4))))


class Dilated(nn.Module):
    """Cycles through dilations: an iterator holds the state, no counter does."""

    def __init__(self, *, cycle: bool) -> None:
        super().__init__()
        self.dilations = itertools.cycle([1, 2, 4]) if cycle else itertools.repeat(1)
        self.weight = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor) -> Any:
        step = next(self.dilations)
        return x + functional.conv1d(x, self.weight, padding=step, dilation=step).tanh()


def iterator_of_dilations() -> Example:
    """An iterator gives the dilation of each call; recomputation takes the next one."""
    blocks = [Dilated(cycle=place == 0) for place in range(3)]
    return example(Chain(*blocks), torch.randn(2, 1, 16))


class Scheduled(Layer):
    """A generator of Python gives the gain of each call; recomputation takes the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = (0.9**power for power in itertools.count())

    def change(self, h: Tensor) -> Any:
        return h * next(self.schedule)


class Cooled(Layer):
    """A forward pre-hook of an inner module cools a temperature, also in recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0
        self.linear.register_forward_pre_hook(self.cool)

    def cool(self, *_: Any) -> None:
        self.tau *= 0.9

    def change(self, h: Tensor) -> Any:
        return h / self.tau


class Windowed(Layer):
    """Reads as many columns as its model has told it."""

    window = 2

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * (torch.arange(WIDTH) < self.window))


class CountsAfterBlocks(Net):
    """The model counts its steps after the blocks have run; recomputation reads the next count."""

    middle = Windowed

    def run(self, x: Tensor) -> Any:
        x = super().run(x)
        self.blocks[1].window += 1
        return x


class Warming(Layer):
    """Reads a global step through a function."""

    def change(self, h: Tensor) -> Any:
        return h * _alpha()


def _alpha() -> float:
    return 1.0 / (1 + _STEP[0] % 5)


class GlobalStep(Net):
    """A global step, which a function of the block reads, moves when forward ends."""

    middle = Warming

    def run(self, x: Tensor) -> Any:
        x = super().run(x)
        _STEP[0] += 1
        return x


class Progress:
    """A step in slots."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


class BranchesOnStep(Layer):
    """Takes another path in every other step of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def change(self, h: Tensor) -> Any:
        return h * 2 if self.progress.step % 2 else h.cos()


class StepInSlots(Net):
    """A block branches on a step that the model moves when its blocks have run."""

    middle = BranchesOnStep

    def run(self, x: Tensor) -> Any:
        x = super().run(x)
        self.blocks[1].progress.step += 1
        return x


class ClassSchedule(Layer):
    """A count on the class divides the residual of each call; recomputation counts on."""

    calls = 0

    def change(self, h: Tensor) -> Any:
        type(self).calls += 1
        return h / type(self).calls


def class_attribute_schedule() -> Example:
    """The count of the class begins anew with each model."""
    ClassSchedule.calls = 0
    return example(Net(*(ClassSchedule() for _ in range(3))))


class CountReadByNextStep(Net):
    """A block counts its calls and only the next step reads the count: the first is equal in all else."""

    middle = Tallying

    def run(self, x: Tensor) -> Any:
        sharpness = 1 + self.blocks[1].calls
        return super().run(x) * sharpness


class MoreDropout(Layer):
    """Drops out more with every call."""

    p = 0.1

    def change(self, h: Tensor) -> Any:
        self.p = min(0.5, self.p + 0.1)
        return functional.dropout(h, self.p, self.training)


class KnowsDepth(Layer):
    """Scales by a depth that its model tells it."""

    depth = 0

    def change(self, h: Tensor) -> Any:
        return h * (1 + self.depth)


class SharedBlock(Net):
    """One block is used three times and told its depth by an attribute."""

    def __init__(self) -> None:
        super().__init__(KnowsDepth())

    def run(self, x: Tensor) -> Any:
        for depth in range(3):
            self.blocks[0].depth = depth
            x = self.blocks[0](x)
        return x


class DepthOfTheClass(Net):
    """Two blocks read a depth of their class, which the model sets before each of them."""

    def __init__(self) -> None:
        super().__init__(DeepByClass(), DeepByClass())

    def run(self, x: Tensor) -> Any:
        for place, block in enumerate(self.blocks):
            DeepByClass.depth = place
            x = block(x)
        return x


class DeepByClass(Layer):
    """Scales by a depth of its class."""

    depth = 0

    def change(self, h: Tensor) -> Any:
        return h * (1 + type(self).depth)


class FirstCall(Layer):
    """Takes another path, with more operators, in its very first call."""

    is_ready = False

    def change(self, h: Tensor) -> Any:
        if self.is_ready:
            return h
        self.is_ready = True
        return h.sin().exp().cos()


class Ramp:
    """A forward hook with a counter."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output * min(1.0, self.calls / 10)


class HookThatCounts(Layer):
    """A hook of an inner module counts its calls and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(Ramp())


class GainInAClosure(Layer):
    """A hook counts in a variable that it encloses."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def hook(_module: nn.Module, inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            return (inputs[0] * (1 + 0.5 * (calls % 4)),)

        self.linear.register_forward_pre_hook(hook)


class ActivationThatCounts(Layer):
    """An activation counts in a variable that it encloses."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def act(h: Tensor) -> Any:
            nonlocal count
            count += 1
            return h * (1 + count % 3)

        self.act = act

    def change(self, h: Tensor) -> Any:
        return self.act(h)


def _warmed(h: Tensor) -> Any:
    step: Any = _warmed
    step.calls = getattr(step, "calls", 0) + 1
    return h * min(1.0, step.calls / 20)


class AttributeOfAFunction(Layer):
    """An activation counts on itself."""

    def change(self, h: Tensor) -> Any:
        return _warmed(h)


class Alternating(Layer):
    """Takes one of two paths in turn, by a phase."""

    phase = "even"

    def change(self, h: Tensor) -> Any:
        self.phase = "odd" if self.phase == "even" else "even"
        return h * 2 if self.phase == "even" else h.cos()


class StepInATensor(Layer):
    """A plain tensor, no buffer, counts and is bound anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.time = torch.zeros(())

    def change(self, h: Tensor) -> Any:
        self.time = self.time + 1
        return h * (1 + self.time.sin())


class ActiveUnits(Layer):
    """A Counter of Python tallies active units; nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.tally: collections.Counter[int] = collections.Counter()

    def change(self, h: Tensor) -> Any:
        self.tally.update((h > 0).sum(1).tolist())
        return h


# Right: what is counted is the same in a recomputation.


class ProgressiveUnfreezing(Net):
    """Counts steps and unfreezes blocks before it runs them: recomputation finds what forward found."""

    step = 0

    def __init__(self) -> None:
        super().__init__(*(Layer() for _ in range(4)))
        self.blocks.requires_grad_(requires_grad=False)

    def run(self, x: Tensor) -> Any:
        self.step += 1
        for place, block in enumerate(self.blocks):
            block.requires_grad_(len(self.blocks) - place <= self.step)
            x = block(x) * min(1.0, self.step / 10)
        return x


class CountsOutside(Net):
    """The model counts its steps and reads the count, outside of its blocks."""

    calls = 0

    def run(self, x: Tensor) -> Any:
        self.calls += 1
        return super().run(x) / min(self.calls, 2)


class CountsAnew(Layer):
    """Each call begins to count at zero."""

    count = 0

    def change(self, h: Tensor) -> Any:
        self.count = 0
        for _ in range(3):
            self.count += 1
            h = h / self.count
        return h


class CountsInForwardOnly(Layer):
    """Counts its calls, but for those of a backward."""

    calls = 0

    def change(self, h: Tensor) -> Any:
        if torch._C._current_graph_task_id() == -1:
            self.calls += 1
        return h


class RowsInABuffer(Net):
    """The model adds up its rows in a buffer once its blocks have run."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def run(self, x: Tensor) -> Any:
        x = super().run(x)
        self.seen += len(x)
        return x


class NamesInTurn(Net):
    """The model takes the next of an iterator and keeps it for a log."""

    last = ""

    def __init__(self) -> None:
        super().__init__()
        self.names = itertools.cycle("abc")

    def run(self, x: Tensor) -> Any:
        self.last = next(self.names)
        return super().run(x)
