"""A step of several micro-batches: the gradients of the whole batch, and the bytes and calls of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment
from harness.measure.parity.compare import compare_steps
from harness.measure.parity.snapshot import Snapshot, steps
from harness.measure.step import StepReport, instrument
from harness.measure.trainee import Watcher, forward_and_backward
from harness.models.base import Batch, joined
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.steps import warm_up
from tests.parity.cases import experiment

_CPU = torch.device("cpu")


def _made(case: Experiment) -> tuple[Assembled, list[Batch]]:
    """Return a fresh model of a case on one rank, with the batches of three steps."""
    batch = batches(case, _CPU, 0)
    return assemble(case, _CPU, None, batch(0).parts()[0]), [batch(step) for step in range(3)]


def _trained(case: Experiment, step: Any = Assembled.step) -> Iterator[Snapshot]:
    trainee, batch = _made(case)
    mutant = type("Mutant", (Assembled,), {"step": step})
    made = mutant(**{name: getattr(trainee, name) for name in Assembled.__dataclass_fields__})
    return steps(made, batch, seed=case.seed)


@cache
def _measured(microbatches: int, variant: str = "none") -> StepReport:
    case = experiment(variant=variant, microbatches=microbatches, model="llama")
    trainee, batch = _made(case)
    warm_up(trainee, batch.__getitem__)
    return instrument(trainee, batch[2])


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_gradients_are_those_of_the_whole_batch(model: str, microbatches: int) -> None:
    whole, cut = (
        next(_trained(experiment(variant="none", model=model, microbatches=count)))
        for count in (1, microbatches)
    )
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(cut.gradients[name].value, gradient.value, rtol=1e-4, atol=1e-6)
    losses = [loss.value for loss in cut.loss.values()]
    torch.testing.assert_close(sum(losses), whole.loss["loss"].value)


def test_micro_batches_are_the_rows_of_the_batch_in_their_order() -> None:
    whole, cut = (batches(experiment(variant="none", microbatches=count), _CPU, 0)(1) for count in (1, 2))
    assert [part.inputs[0].tolist() for part in cut.parts()] == [
        rows.tolist() for rows in whole.inputs[0].split(2)
    ]
    assert whole.parts() == (whole,)


def test_every_block_runs_once_a_micro_batch() -> None:
    assert _measured(4).work.calls == {"layers.0": 4, "layers.1": 4}
    assert _measured(4, "full").work.calls == {"layers.0": 8, "layers.1": 8}


def test_flops_are_those_of_the_whole_batch() -> None:
    for variant in ("none", "full"):
        whole, cut = (_measured(count, variant).work for count in (1, 4))
        assert cut.forward_flops == whole.forward_flops
        assert cut.backward_flops == whole.backward_flops
        assert cut.recomputed_flops == whole.recomputed_flops


def test_saved_bytes_are_those_of_one_forward() -> None:
    case = experiment(variant="none", model="llama", batch_size=1)
    trainee, batch = _made(case)
    warm_up(trainee, batch.__getitem__)
    alone = instrument(trainee, batch[2]).memory
    divisor_bytes = 8  # of the loss, which backward divides by it too
    assert _measured(4).memory.saved_bytes == alone.saved_bytes + divisor_bytes
    # the second micro-batch has the gradients of the first, and makes its own
    assert alone.peak_bytes < _measured(4).memory.peak_bytes < _measured(1).memory.peak_bytes


def test_parts_of_the_peak_add_up() -> None:
    memory = _measured(4).memory
    assert sum(memory.peak_parts.values()) == memory.peak_bytes


def _dropping_the_last(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    parts = batch.parts()
    Assembled.step(trainee, joined(parts[:-1]) if len(parts) > 2 else batch, watcher)


def _unscaled(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    for part in batch.parts():
        forward_and_backward(trainee, part, watcher)


def _scaled_twice(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    for part in batch.parts():
        forward_and_backward(trainee, part, watcher, microbatches=len(batch.parts()) ** 2)


def _scaled_once_more_after(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    Assembled.step(trainee, batch, watcher)
    for parameter in trainee.model.parameters():
        assert isinstance(parameter.grad, Tensor)
        parameter.grad /= len(batch.parts())


def _twice_the_first(trainee: Assembled, batch: Batch, watcher: Watcher) -> None:
    parts = batch.parts()
    Assembled.step(trainee, joined((parts[0], *parts[:-1])), watcher)


@pytest.mark.parametrize(
    ("step", "part", "name"),
    [
        pytest.param(_dropping_the_last, "outputs", "microbatch[3].outputs", id="the last one is dropped"),
        pytest.param(_unscaled, "loss", "microbatch[0].loss", id="the loss is not scaled"),
        pytest.param(_scaled_twice, "loss", "microbatch[0].loss", id="the loss is scaled twice"),
        pytest.param(_scaled_once_more_after, "gradients", "norm.weight", id="gradients are scaled again"),
        pytest.param(_twice_the_first, "outputs", "microbatch[1].outputs", id="the first one comes twice"),
    ],
)
def test_the_comparison_rejects_a_step_that_is_another(step: Any, part: str, name: str) -> None:
    case = experiment(variant="none", microbatches=4)
    found = compare_steps(_trained(case), _trained(case, step), count=1, rank=0, tolerance=None)
    assert found.first is not None
    assert (found.first.part, found.first.name) == (part, name)
    same = compare_steps(_trained(case), _trained(replace(case)), count=1, rank=0, tolerance=None)
    assert same.is_equal


@pytest.mark.parametrize(
    ("count", "batch_size", "words"),
    [
        (0, 4, "microbatches: must be at least 1, got 0"),
        (
            3,
            4,
            "microbatches: must divide the 4 samples of a step, got 3; make batch_size a multiple of 3",
        ),
    ],
)
def test_refusals(count: int, batch_size: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        experiment(microbatches=count, batch_size=batch_size)
    assert str(refusal.value) == words


def test_one_micro_batch_leaves_the_address_of_a_trial() -> None:
    assert "microbatches" not in experiment().to_dict()
    assert experiment(microbatches=2).to_dict()["microbatches"] == 2
