"""Probes of a trial: asked where parity saw no difference, on the models of the first link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment, name_of
from harness.measure.parity.compare import compare_steps
from harness.measure.probes.micro_batches import joined
from harness.models.base import Batch
from harness.records.probed import Probed
from harness.trial.asking import TrialModels, first_link
from tests.harness.check.small_models import Growing, Stack, batch, checkpointed, stack_of
from tests.harness.composing import experiment_of
from tests.toy_trainee import toy_trainee

KEPT: list[Tensor] = []


def _keeping(model: Stack) -> None:
    """Checkpoint each block, and keep its inputs where no module leads to."""
    checkpointed()(model)
    model.register_forward_hook(lambda _module, inputs, _outputs: KEPT.append(inputs[0] + 1))


ALL = ("recomputed_values", "input_dependence", "between", "leak")


def _probed(
    make: Callable[[], nn.Module], variant: Callable[[Any], None], line: str, **changed: Any
) -> Probed:
    def assembled(experiment: Experiment) -> Any:
        trainee = toy_trainee(make)
        if name_of(experiment.ac) != "none":
            variant(trainee.model)
        return trainee

    models = TrialModels(
        link=first_link(experiment_of(f"{line} protocol=parity")),
        **{
            "assembled": assembled,
            "batch": lambda step: Batch(inputs=batch(4 + step), targets=None),
            "device": torch.device("cpu"),
            "rank": 0,
            "dp_rank": 0,
            "earliest": lambda step: step,
            **changed,
        },
    )
    sides = (models.trained(models.trainee(is_variant=each), _steps(models)) for each in (False, True))
    return models.asked(compare_steps(*sides, count=1))


def _steps(models: TrialModels) -> list[Batch]:
    return [joined(models.batches[:1])]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], str, tuple[str, ...], str]] = {
    "neutral": (Stack, checkpointed(), "ac=full", ALL, ""),
    "state shared by micro-batches": (stack_of(Growing), checkpointed(), "ac=full", ALL[:3], "between"),
    "a region that keeps its inputs": (Stack, _keeping, "ac=full", ALL, "leak"),
    "no variant": (Stack, checkpointed(), "ac=none", ALL[1:2], ""),
    "compiled": (Stack, checkpointed(), "ac=full compile=aot_eager", ALL[1:3], ""),
    "parity has seen it": (Stack, checkpointed(preserve_rng_state=False), "ac=full", ALL[:1], ""),
}


@pytest.mark.parametrize("case", CASES)
def test_asks_and_finds(case: str) -> None:
    make, variant, line, asked, probe = CASES[case]
    probed = _probed(make, variant, line)
    assert (probed.asked, probed.finding and probed.finding.probe) == (asked, probe or None)


def test_says_where_a_recomputation_leaves_forward_and_why() -> None:
    probed = _probed(Stack, checkpointed(preserve_rng_state=False), "ac=full")
    assert probed.recomputation.startswith("aten.bernoulli_.float in 'layers.1.down' (call 0")
    assert probed.cause.startswith("looks like gallery 11 or 27 or 60 or 61: random numbers such as dropout")


def test_probes_that_do_not_fit_are_given_up() -> None:
    made: list[str] = []

    def assembled(_experiment: Experiment) -> Any:
        made.append("model")
        if len(made) > 2:
            raise torch.OutOfMemoryError
        return toy_trainee(Stack)

    probed = _probed(Stack, checkpointed(), "ac=full", assembled=assembled)
    assert probed == Probed(notes=("the probes were given up, because they need more memory than there is",))
