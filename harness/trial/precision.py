"""Precision: which dtypes an experiment keeps and computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from harness.experiment.experiment import Experiment
from harness.models.parts import made_model

PARAMETER_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_mixed": torch.float32}
"""The dtype of parameters at rest by `dtype`; `own` leaves each as it was made."""
_AUTOCAST_DTYPE = torch.bfloat16


def cast(model: nn.Module, experiment: Experiment) -> dict[str, int]:
    """Cast `model` in place as `dtype` asks; return the number of tensors by what happened to them.

    Raises:
        ConfigError: something cannot be cast without loss.
    """
    return cast_as(model, experiment.dtype, with_buffers=experiment.model.casts_buffers())


def cast_as(model: nn.Module, dtype: str, *, with_buffers: bool) -> dict[str, int]:
    """Cast `model` in place to a `dtype` of the configuration, as `cast` does."""
    if dtype == "own":
        return {}
    return made_model.cast(model, PARAMETER_DTYPE[dtype], asked=dtype, with_buffers=with_buffers)


def compute_dtype(experiment: Experiment, model: nn.Module) -> torch.dtype:
    """Return the dtype of most matrix multiplications; parameters may be wider.

    Args:
        experiment: has the precision.
        model: before it is sharded.
    """
    return _AUTOCAST_DTYPE if experiment.dtype == "bf16_mixed" else made_model.main_dtype(model)


def autocast(experiment: Experiment, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the context in which the model and the loss of `experiment` run."""
    if experiment.dtype != "bf16_mixed" or experiment.mesh.is_sharded:  # FSDP casts by its own policy
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=_AUTOCAST_DTYPE)
