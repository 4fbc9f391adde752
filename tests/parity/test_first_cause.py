"""Faults as users bring them: the verdict, and the first cause that its reason names."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment, name_of
from harness.models.base import Batch
from harness.records.parity_result import Parity
from harness.records.verdict import verdict
from harness.trial.links import chain
from harness.trial.proof import Prover
from strategies import Strategy
from strategies.ac.full import Full
from strategies.ac.selective_layer import SelectiveLayer
from tests.harness.composing import experiment_of
from tests.toy_trainee import ToyTrainee, toy_batches

WIDTH, STEPS = 8, 2
Middle = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """A residual block with anything between its two linear layers, and some state to spoil."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        self.calls, self.scale, self.read_at = 0, 1.0, 0.0
        self.log: list[float] = []
        self.mean = torch.zeros(())
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.middle(self, self.up(x)))
        return result


class Stack(nn.Module):
    def __init__(self, *middles: Middle) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(middle) for middle in middles)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        outputs: Tensor = self.head(x)
        return outputs


def right(_block: Block, x: Tensor) -> Tensor:
    return x.sin()


def counting(block: Block, x: Tensor) -> Tensor:
    block.calls += 1
    return (x * block.calls).sin()


def logging(block: Block, x: Tensor) -> Tensor:
    block.log.append(float(x.detach().sum()))
    return x.sin()


def averaging(block: Block, x: Tensor) -> Tensor:
    block.mean = 0.9 * block.mean + x.detach().mean()
    return x.sin()


def drawing_its_own(block: Block, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=block.generator)


def drawing_of_numpy(_block: Block, x: Tensor) -> Tensor:
    np.random.rand()  # noqa: NPY002 (what users call)
    return x.sin()


def drawing_of_python(_block: Block, x: Tensor) -> Tensor:
    return x.sin() * (random.random() + 0.5)


def telling_the_time(block: Block, x: Tensor) -> Tensor:
    block.read_at = time.perf_counter()
    return x.sin()


def sharing(_block: Block, x: Tensor) -> Tensor:
    SHARED["calls"] += 1
    return x * SHARED["calls"]


SHARED = {"calls": 0}


class Scheduled(Stack):
    """A model that reads what its blocks count in the file, from zero in each model."""

    def __init__(self) -> None:
        super().__init__(counting_in_the_file)
        SHARED["calls"] = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / SHARED["calls"]


def counting_in_the_file(_block: Block, x: Tensor) -> Tensor:
    SHARED["calls"] += 1
    return x.sin()


def without_a_number(_block: Block, x: Tensor) -> Tensor:
    return (-x.square() - 1).log()


class Dead(Block):
    """A block of which no parameter has an influence."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + 0 * super().forward(x)
        return result


class Unrestored(Block):
    """A block that puts its state back after the last tensor that backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale *= 2
        y: Tensor = (self.up(x) * self.scale).sin()
        self.scale /= 2
        return y


class CountingTogether(Block):
    """A block whose calls are counted by its class, from zero in each model."""

    calls_of_all = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls_of_all += 1
        return super().forward(x / type(self).calls_of_all)


def counted_together(middle: Middle) -> nn.Module:
    CountingTogether.calls_of_all = 0
    return of_blocks(CountingTogether, middle)


def of_blocks(cls: type[Block], middle: Middle = right) -> nn.Module:
    model = Stack(middle, middle)
    for block in model.layers:
        block.__class__ = cls
    return model


def frozen() -> nn.Module:
    model = Stack(counting)
    for parameter in model.layers.parameters():
        parameter.requires_grad_(False)
    return model


def initialised_by_chance() -> nn.Module:
    model = Stack(right)
    nn.init.constant_(model.head.weight, random.SystemRandom().random())
    return model


CASES = [
    pytest.param(lambda: Stack(right, right), "neutral", None, id="a model that is right"),
    pytest.param(
        lambda: Stack(right, counting, right),
        "differs",
        "parity: gradient of 'layers.1.down.weight' differs first at (0, 0) on rank 0 in step 0: ",
        id="a counter in the middle block",
    ),
    pytest.param(
        lambda: Stack(right, drawing_of_python),
        "differs",
        "parity: gradient of 'layers.1.down.weight' differs first at (0, 0) on rank 0 in step 0: ",
        id="numbers of Python",
    ),
    pytest.param(
        lambda: counted_together(right),
        "differs",
        "parity: gradient of 'layers.1.down.weight' differs first at (0, 0) on rank 0 in step 0: ",
        id="a counter of the class, from zero in each model",
    ),
    pytest.param(
        lambda: Stack(drawing_its_own, right),
        "differs",
        "parity: gradient of 'layers.0.down.weight' differs first at (0, 0) on rank 0 in step 0: ",
        id="a generator of its own",
    ),
    pytest.param(
        lambda: Stack(drawing_of_numpy),
        "differs",
        "parity: RNG state 'numpy' differs first at (624,) on rank 0 in step 0: ",
        id="numbers of NumPy that nothing uses",
    ),
    pytest.param(
        lambda: Stack(logging),
        "differs",
        "parity: state 'length of layers.0.log' differs on rank 0 in step 0: int 1 vs int 2",
        id="a list that grows",
    ),
    pytest.param(
        lambda: Stack(averaging),
        "differs",
        "parity: state 'layers.0.mean' differs on rank 0 in step 0: ",
        id="a mean outside of buffers",
    ),
    pytest.param(
        lambda: of_blocks(Unrestored),
        "differs",
        "parity: state 'layers.0.scale' differs on rank 0 in step 0: float 1.0 vs float 2.0",
        id="state that early stop leaves changed",
    ),
    pytest.param(
        frozen,
        "differs",
        "parity: gradient of input 'inputs[0]' differs first at (0, 0) on rank 0 in step 0: ",
        id="a frozen block, seen in the gradient of its input",
    ),
    pytest.param(lambda: Stack(telling_the_time), "neutral", None, id="a time of day in an attribute"),
    pytest.param(
        lambda: Stack(sharing),
        "unverified",
        "the plain model does not repeat itself: output 'outputs' differs first at (0, 0) on rank 0 ",
        id="state of a file that twin and variant share",
    ),
    pytest.param(
        Scheduled,
        "unverified",
        "the plain model does not repeat itself: output 'outputs' differs first at (0, 0) on rank 0 ",
        id="the same, from zero in each model",
    ),
    pytest.param(
        initialised_by_chance,
        "unverified",
        "the plain model does not repeat itself: output 'outputs' differs first at (0, 0) on rank 0 ",
        id="weights by chance",
    ),
    pytest.param(
        lambda: Stack(without_a_number),
        "unverified",
        "gradients are not finite on both sides from step 0 on, first that of 'head.bias': ",
        id="NaN",
    ),
    pytest.param(
        lambda: of_blocks(Dead),
        "unverified",
        "the gradients inside every checkpointed block are zero or absent on both sides from step 0 on, ",
        id="blocks without influence",
    ),
]


@pytest.mark.parametrize(("make", "word", "reason"), CASES)
def test_verdict_and_first_cause(make: Callable[[], nn.Module], word: str, reason: str | None) -> None:
    SHARED["calls"] = 0
    parity = parity_of(make, Full(layers_fqn="layers"))
    found = verdict(saves_nothing=True, memory=None, work=None, parity=parity)
    assert found.word == word
    assert (found.reason is None) == (reason is None)
    assert (found.reason or "").startswith(reason or "")


@pytest.mark.parametrize(("ac_freq", "word"), [(1, "neutral"), (2, "unverified")])
def test_zeros_count_in_the_blocks_that_are_checkpointed(ac_freq: int, word: str) -> None:
    def half_dead() -> nn.Module:
        model = Stack(right, right)
        model.layers[1].__class__ = Dead
        return model

    parity = parity_of(half_dead, SelectiveLayer(layers_fqn="layers", ac_freq=ac_freq))
    assert verdict(saves_nothing=True, memory=None, work=None, parity=parity).word == word


def parity_of(make: Callable[[], nn.Module], variant: Strategy) -> Parity:
    """Return how a variant compares with the plain model, whose inputs get gradients."""
    (link,) = chain(experiment_of(f"ac=full protocol.parity_steps={STEPS}"))
    batches = [
        Batch(inputs=(batch.inputs[0].requires_grad_(),), targets=None)
        for batch in toy_batches(STEPS, 4, WIDTH)
    ]

    def assembled(experiment: Experiment) -> Any:
        torch.manual_seed(0)
        model = make()
        if name_of(experiment.ac) == "full":
            model = variant.apply(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        blocks = {f"layers.{name}": each for name, each in model.get_submodule("layers").named_children()}
        return ToyTrainee(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), call=model, blocks=blocks)

    return Prover(assembled=assembled, batch=batches.__getitem__, rank=0, dp_rank=0).compare(link)
