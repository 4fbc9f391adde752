"""The plain model of an experiment, and its training step as those plan for it that transform the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.experiment.experiment import Experiment
from harness.models.base import Batch, LossFunction
from harness.trial.precision import autocast, cast, compute_dtype
from strategies import PlannedStep, call_site_of
from strategies.regions.blocks import children_of

_NUMPY_SEEDS = 1 << 32


def build(experiment: Experiment, device: torch.device) -> tuple[nn.Module, LossFunction, dict[str, int]]:
    """Return the plain model as the experiment's seed initialises it, its loss, and what was cast."""
    # a user's module may draw its weights from any of these
    torch.manual_seed(experiment.seed)
    random.seed(experiment.seed)
    np.random.seed(experiment.seed % _NUMPY_SEEDS)  # noqa: NPY002 (the legacy generator is the global one)
    with torch.device(device):
        model, loss = experiment.model.make()
    model = model.to(device=device)
    return model, loss, cast(model, experiment)


def planned_step(
    experiment: Experiment, model: nn.Module, loss: LossFunction, sample: Batch, device: torch.device
) -> PlannedStep:
    """Return the training step of `experiment`, as a plan for its plain `model` needs it.

    Args:
        experiment: has the regions of AC, the precision and the mesh.
        model: before it is sharded.
        loss: function of its outputs and a batch.
        sample: a batch of one rank.
        device: on which the trial runs; autocast depends on it.
    """
    spec, mesh = experiment.model, experiment.mesh
    units = children_of(model, spec.layers_fqn) if spec.layers_fqn else {}
    sizes = [_parameter_bytes(unit) for unit in units.values()]
    may_join_loss = spec.loss_reads_targets_only()
    seen = Batch(inputs=(), targets=None) if may_join_loss else sample  # a plan may keep it
    is_cast = experiment.dtype == "bf16_mixed" and mesh.is_sharded
    return PlannedStep(
        loss=partial(_loss_of, loss, seen),
        loss_inputs=(sample.targets,),
        may_join_loss=may_join_loss,
        reserved_bytes=_gradient_copies(_parameter_bytes(model), sizes) if mesh.is_sharded else 0,
        enclose=partial(_enclosed, experiment),
        device=device,
        autocast=autocast(experiment, device),
        computes_in=compute_dtype(experiment, model) if is_cast else None,
        units=tuple(units),
    )


def _loss_of(loss: LossFunction, seen: Batch, outputs: Any, targets: Any) -> Tensor:
    return loss(outputs, replace(seen, targets=targets))


def _enclosed(experiment: Experiment, model: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """Put the AC of `experiment` on `model` and return the callable of a step."""
    if experiment.wrap_order == "call_site":
        return call_site_of(experiment.ac, model)
    return experiment.ac.apply(model, inputs)


def _gradient_copies(model_bytes: int, unit_bytes: list[int]) -> int:
    """Return the most bytes of unsharded gradients that FSDP holds at once.

    Those of the root unit are held from the first to the last; those of a unit stand beside what was copied
    of them, or of the unit before, to be reduced.
    """
    return model_bytes - sum(unit_bytes) + 2 * max(unit_bytes, default=model_bytes)


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
