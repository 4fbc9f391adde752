"""The sharding plan of a trial, made on a model without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.experiment.experiment import Experiment
from harness.trial.precision import PARAMETER_DTYPE, autocast, cast, compute_dtype
from strategies.regions.blocks import children_of
from strategies.shard.model.graph import TensorAxis
from strategies.shard.model.shard_plan import ShardPlan
from strategies.tracing.shadow import compute_in


def plan_sharding(experiment: Experiment, inputs: tuple[Any, ...], device: torch.device) -> ShardPlan | None:
    """Return the plan of the sharding variant, made on a model without memory; `None` for `shard=none`.

    Args:
        experiment: experiment of the trial.
        inputs: inputs of one rank; meta tensors are enough.
        device: on which the trial runs; autocast depends on it.

    Raises:
        StrategyError: the variant does not fit the model.
    """
    if not experiment.is_sharded:
        return None
    spec, mesh = experiment.model, experiment.mesh
    with torch.device("meta"):
        model = spec.build()
    cast(model, experiment)
    is_cast = experiment.dtype == "bf16_mixed" and mesh.is_sharded
    if is_cast:
        units = children_of(model, spec.layers_fqn) if spec.layers_fqn else {}
        compute_in(compute_dtype(experiment, model), model, units.values())
    axis = TensorAxis(
        ranks=mesh.tp,
        splits=_pairs(spec.tensor_parallel_plan()),
        data_ranks=mesh.dp,
        parameter_shards=mesh.dp_shard,
        parameter_itemsize=PARAMETER_DTYPE[experiment.dtype].itemsize if is_cast else None,
    )
    with autocast(experiment, device)():
        return experiment.shard.plan(model, inputs, axis)


def _pairs(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the linears between which the model's code runs on a shard of features."""
    return {pattern: style for pattern, style in plan.items() if style in ("column", "row")}
