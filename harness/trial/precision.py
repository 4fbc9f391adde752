"""Precision: which dtypes a model keeps and computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.experiment.experiment import Experiment
from harness.models.parts import made_model

_PARAMETERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_mixed": torch.float32}
_MIXED = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of one experiment, decided before its model is built.

    Fields:
        asked: `dtype` of the configuration.
        casts_buffers: whether buffers get the dtype of parameters.
        in_units: dtype to which FSDP casts parameters in use and inputs of its units; `None`: no cast.
        autocast: makes the context in which the model and its loss run.
    """

    asked: str
    casts_buffers: bool
    in_units: torch.dtype | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def of(cls, experiment: Experiment, device: torch.device) -> Precision:
        """Return the precision of `experiment` on a device; autocast depends on its type."""
        is_mixed, is_sharded = experiment.dtype == "bf16_mixed", experiment.mesh.is_sharded
        casts_by_autocast = is_mixed and not is_sharded  # FSDP casts by its own policy
        return cls(
            asked=experiment.dtype,
            casts_buffers=experiment.model.casts_buffers(),
            in_units=_MIXED if is_mixed and is_sharded else None,
            autocast=partial(torch.autocast, device.type, dtype=_MIXED) if casts_by_autocast else nullcontext,
        )

    @property
    def parameters(self) -> torch.dtype | None:
        """The dtype of parameters at rest; `None`: each as it was made."""
        return _PARAMETERS.get(self.asked)

    def cast(self, model: nn.Module) -> dict[str, int]:
        """Cast `model` in place; return the number of tensors by what happened to them.

        Raises:
            ConfigError: something cannot be cast without loss.
        """
        if self.parameters is None:
            return {}
        return made_model.cast(model, self.parameters, asked=self.asked, with_buffers=self.casts_buffers)

    def computes_in(self, model: nn.Module) -> torch.dtype:
        """Return the dtype of most matrix multiplications of a model that is not sharded yet."""
        return _MIXED if self.asked == "bf16_mixed" else made_model.main_dtype(model)
