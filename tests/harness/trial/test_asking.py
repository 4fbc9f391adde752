"""Probes of a trial: asked where parity saw no difference, on the models of the first link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment, name_of
from harness.measure.parity.compare import compare_steps
from harness.models.base import Batch, joined
from harness.records.probed import Probed
from harness.trial.asking import TrialModels
from harness.trial.links import chain
from tests.harness.check.small_models import Growing, Stack, batch, checkpointed, stack_of
from tests.harness.composing import experiment_of
from tests.rank_pool import RankPool
from tests.toy_trainee import ToyTrainee, toy_trainee

KEPT: list[Tensor] = []


def _keeping(model: Stack) -> None:
    """Checkpoint each block, and keep its inputs where no module leads to."""
    checkpointed()(model)
    model.register_forward_hook(lambda _module, inputs, _outputs: KEPT.append(inputs[0] + 1))


ALL = ("recomputed_values", "input_dependence", "between", "leak", "finite_differences", "late_reads")


def _probed(
    make: Callable[[], nn.Module], variant: Callable[[Any], None], line: str, **changed: Any
) -> Probed:
    def assembled(experiment: Experiment) -> Any:
        trainee = toy_trainee(make)
        if name_of(experiment.ac) != "none":
            variant(trainee.model)
        return trainee

    models = TrialModels(
        link=chain(experiment_of(f"{line} protocol=parity"))[0],
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
    "a region that keeps its inputs": (Stack, _keeping, "ac=full", ALL[:4], "leak"),
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


class WithLoss(ToyTrainee):
    """A trainee whose plan includes the loss: outputs are never whole."""

    def forward(self, batch: Batch) -> tuple[None, Tensor]:
        """Return the loss alone."""
        return None, super().forward(batch)[1]


def test_outputs_that_are_never_whole_are_not_compared() -> None:
    def assembled(experiment: Experiment) -> ToyTrainee:
        made = toy_trainee(Stack)
        if name_of(experiment.ac) == "none":
            return made
        return WithLoss(model=made.model, optimizer=made.optimizer, call=made.call)

    probed = _probed(Stack, checkpointed(), "ac=full", assembled=assembled)
    assert (probed.asked, probed.finding) == (ALL, None)


def test_probes_that_do_not_fit_are_given_up() -> None:
    made: list[str] = []

    def assembled(_experiment: Experiment) -> Any:
        made.append("model")
        if len(made) > 2:
            raise torch.OutOfMemoryError
        return toy_trainee(Stack)

    probed = _probed(Stack, checkpointed(), "ac=full", assembled=assembled)
    assert probed == Probed(notes=("the probes were given up, because they need more memory than there is",))


class Failing(Stack):
    """Raises in the forward of the second micro-batch that is in flight; what it raises, if any."""

    error: type[Exception] | None = None
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return what the stack returns."""
        self.calls += 1
        if self.error is not None and self.training and self.calls > 1:
            raise self.error("on this rank")
        return super().forward(x)


def _failing_on(rank: int, guilty: Mapping[int, type[Exception]], *, is_variant: bool) -> Probed:
    def variant(model: Any) -> None:
        checkpointed()(model)
        model.error = guilty.get(rank) if is_variant else None

    def plain() -> nn.Module:
        model = Failing()
        model.error = None if is_variant else guilty.get(rank)
        return model

    def earliest(step: int | None) -> int | None:
        given = torch.tensor(99 if step is None else step)
        torch.distributed.all_reduce(given, torch.distributed.ReduceOp.MIN)
        return None if given.item() == 99 else int(given)

    line = "ac=full mesh=ddp2"
    return _probed(plain, variant, line, rank=rank, earliest=earliest)


FAILURES: dict[str, tuple[Mapping[int, type[Exception]], bool, tuple[str, ...], list[str], str]] = {
    "the variant on rank 1": (
        {1: ValueError},
        True,
        ALL[:3],
        ["with micro-batches in flight, the variant's forward raises ValueError: on this rank"] * 2,
        "",
    ),
    "the variant on both": (
        {0: ValueError, 1: KeyError},
        True,
        ALL[:3],
        ["raises ValueError: on this rank"] * 2,  # the first rank's
        "",
    ),
    "the plain model on rank 1": (
        {1: ValueError},
        False,
        ALL[:4],
        ["", ""],
        "with micro-batches in flight the plain model raises",
    ),
    "out of memory on rank 1": (
        {1: torch.OutOfMemoryError},
        True,
        (),
        ["", ""],
        "the probes were given up, because they need more memory than there is",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_ranks_go_on_alike_where_one_of_them_raises(case: str, pool2: RankPool) -> None:
    guilty, is_variant, asked, reasons, note = FAILURES[case]
    found = pool2.run(_failing_on, guilty, is_variant=is_variant, timeout_s=20.0)
    assert [each.asked for each in found] == [asked] * 2
    for each, reason in zip(found, reasons, strict=True):
        assert (each.finding is not None) == bool(reason)
        assert each.finding is None or reason in each.finding.reason
        assert note in " ".join(each.notes)
