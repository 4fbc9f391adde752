"""The training step of an experiment, for strategies that make a plan of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment
from harness.models.base import Batch, LossFunction
from harness.trial.plain_model import PlainModel
from strategies import PlannedStep


def planned_step(
    experiment: Experiment, plain: PlainModel, sample: Batch, device: torch.device
) -> PlannedStep:
    """Return what a strategy needs to know of the training step of `experiment` to plan for its plain model.

    Args:
        experiment: has the regions of AC and the mesh.
        plain: the model, with its loss and precision.
        device: on which the trial runs.
    """
    may_join_loss = experiment.model.loss_reads_targets_only()
    seen = Batch(inputs=(), targets=None) if may_join_loss else sample  # a plan may keep it
    return PlannedStep(
        loss=partial(_loss_of, plain.loss, seen),
        loss_inputs=(sample.targets,),
        may_join_loss=may_join_loss,
        reserved_bytes=_gradient_copies(plain) if experiment.mesh.is_sharded else 0,
        enclose=partial(_enclosed, experiment),
        device=device,
        autocast=plain.precision.autocast,
        computes_in=plain.precision.in_units,
        units=tuple(plain.units),
    )


def _loss_of(loss: LossFunction, seen: Batch, outputs: Any, targets: Any) -> Tensor:
    return loss(outputs, replace(seen, targets=targets))


def _enclosed(experiment: Experiment, model: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """Put the AC of `experiment` on `model` and return the callable of a step."""
    if experiment.wrap_order == "call_site":
        return experiment.ac.call_site(model)
    return experiment.ac.apply(model, inputs)


def _gradient_copies(plain: PlainModel) -> int:
    """Return the most bytes of unsharded gradients that FSDP holds at once.

    Those of the root unit are held during all of backward. Beside them are those of one unit, and a copy of
    them, or of those of the unit before, that is being reduced.
    """
    model_bytes, *unit_bytes = (
        sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        for module in (plain.model, *plain.units.values())
    )
    return model_bytes - sum(unit_bytes) + 2 * max(unit_bytes, default=model_bytes)
