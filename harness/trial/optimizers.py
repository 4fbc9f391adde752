"""Optimizers, by the words of `optimizer`."""

from __future__ import annotations

import torch
from torch import nn

from harness.experiment.experiment import Experiment


def optimizer_of(experiment: Experiment, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that `experiment` names, of all parameters of `model`."""
    # the fused list kernels refuse a mixture of plain and DTensor parameters, which tensor parallelism makes,
    # and one of DTensors on several meshes, as experts are
    foreach = False if experiment.mesh.tp * experiment.mesh.ep > 1 else None
    if experiment.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=experiment.learning_rate, foreach=foreach)
    return torch.optim.AdamW(model.parameters(), lr=experiment.learning_rate, foreach=foreach)
