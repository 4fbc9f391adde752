"""Precision: which dtypes an experiment keeps and computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from harness.experiment.experiment import Experiment

PARAMETER_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_mixed": torch.float32}
"""The dtype of parameters at rest by `dtype`."""
COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_mixed": torch.bfloat16}
"""The dtype of matrix multiplications by `dtype`; parameters may be wider."""


def autocast(experiment: Experiment, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the context in which the model and the loss of `experiment` run."""
    if experiment.dtype != "bf16_mixed" or experiment.mesh.is_sharded:  # FSDP casts by its own policy
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
