"""The plan of a strategy that plans from a step: made in a trial, before its model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from harness.errors import ConfigError
from harness.experiment.experiment import Experiment, name_of
from harness.measure.step import runnable_step, write_plan
from harness.measure.trainee import Trainee
from harness.models.base import Batch
from harness.trial.steps import UNMEASURED_STEPS, warm_up
from strategies import PlansFromStep

PLAN_FILE = "plan.json"
"""Name of the file in the folder of a trial."""


def with_plan(
    experiment: Experiment,
    assemble: Callable[[Experiment], Trainee],
    batch: Callable[[int], Batch],
    file: Path,
    *,
    warm_up_steps: int = UNMEASURED_STEPS,
) -> Experiment:
    """Return `experiment` with the plan of its AC in `file`, which rank 0 writes, where its AC plans.

    The plain model takes a step on all ranks, and rank 0 plans for what it sees.

    Args:
        experiment: the trial.
        assemble: makes a fresh model.
        batch: returns this rank's share of a step's batch.
        file: a file that all ranks share.
        warm_up_steps: steps that nobody watches.

    Raises:
        ConfigError: chunks would change what was planned for.
        StrategyError: there is no plan, on rank 0.
    """
    ac = experiment.ac
    if not isinstance(ac, PlansFromStep):
        return experiment
    if name_of(experiment.chunk) != "none":
        name = f"ac={name_of(ac)} chunk={name_of(experiment.chunk)}"
        raise ConfigError("chunk", f"{name} plan for the same bytes; use chunk=none")
    if ac.has_plan:
        return experiment
    trainee = assemble(experiment.plain().uncompiled())
    warm_up(trainee, batch, steps=warm_up_steps)
    step = replace(runnable_step(trainee, batch(UNMEASURED_STEPS)), compiler=experiment.compile)
    write_plan(ac, step, file)
    trainee.zero_grad()
    if dist.is_initialized():
        dist.barrier()
    return replace(experiment, ac=ac.with_plan(file))
