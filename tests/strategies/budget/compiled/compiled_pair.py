"""A planned model whose blocks are compiled, beside its twin under the same compiler, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.experiment.experiment import Experiment
from harness.measure.step import StepReport, instrument
from harness.models.base import Batch
from harness.trial.assemble import Assembled, assemble
from harness.trial.batches import batches
from harness.trial.plan_budget import PLAN_FILE, with_plan
from strategies.ac.budget import Budget
from strategies.budget.plan import Plan
from tests.harness.composing import experiment_of
from tests.parity.cases import devices_of

CPU = torch.device("cpu")
COMPILED = "ac=budget ac.executor=compiled"


def assembled(experiment: Experiment, batch: Callable[[int], Batch]) -> Assembled:
    """Return the model of an experiment, on its mesh."""
    return assemble(experiment, CPU, devices_of(experiment.mesh), batch(0))


def trained(experiment: Experiment, batch: Callable[[int], Batch]) -> tuple[Assembled, list[Tensor]]:
    """Return a model after two steps, with what this rank has of it, and where its generator is."""
    trainee = assembled(experiment, batch)
    for step in range(2):
        trainee.zero_grad()
        torch.manual_seed(step)
        trainee.backward(trainee.forward(batch(step))[1])
        trainee.update()
    kept = [local(parameter).clone() for parameter in trainee.model.parameters()]
    return trainee, [*kept, torch.get_rng_state()]


def local(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor."""
    found: Tensor = tensor.detach()
    return getattr(found, "_local_tensor", found)


class Pair:
    """A planned model and its twin, after two steps.

    Args:
        line: overrides beside those of the executor.
        folder: where the plan goes; all ranks share it.
        rank: this one.
    """

    def __init__(self, line: str, folder: Path, rank: int = 0) -> None:
        asked = experiment_of(f"{COMPILED} {line}")
        self.batch = batches(asked, CPU, asked.mesh.data_rank(rank))
        made = folder / PLAN_FILE
        planned = with_plan(asked, lambda each: assembled(each, self.batch), self.batch, made, device=CPU)
        assert isinstance(planned.ac, Budget)
        self.plan = Plan.load(Path(planned.ac.plan_file or made))
        self.planned, self.state = trained(planned, self.batch)
        self.twin, self.twin_state = trained(asked.twin(), self.batch)

    def reports(self) -> tuple[StepReport, StepReport]:
        """Return what a watched step of each shows."""
        return instrument(self.planned, self.batch(2)), instrument(self.twin, self.batch(2))

    def gradients(self, batch: Batch) -> list[list[Tensor]]:
        """Return the gradients of both on another batch."""
        found = []
        for trainee in (self.planned, self.twin):
            trainee.zero_grad()
            torch.manual_seed(0)
            trainee.backward(trainee.forward(batch)[1])
            parameters = [each for each in trainee.model.parameters() if each.grad is not None]
            found.append([local(each.grad) for each in parameters])
        return found
