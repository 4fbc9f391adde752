"""The sharding plan of a trial, made on a model without memory."""

from __future__ import annotations

from typing import Any

import torch

from harness.experiment.experiment import Experiment
from harness.trial.plain_model import PlainModel
from strategies.shard.model.graph import TensorAxis
from strategies.shard.model.shard_plan import ShardPlan
from strategies.tracing.shadow import compute_in


def plan_sharding(experiment: Experiment, inputs: tuple[Any, ...], device: torch.device) -> ShardPlan | None:
    """Return the plan of the sharding variant, made on a model without memory; `None` for `shard=none`.

    Args:
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
    plain = PlainModel.cast(experiment, model, spec.loss, device)
    precision, itemsize = plain.precision, None
    if precision.in_units is not None:
        compute_in(precision.in_units, model, plain.units.values())
        itemsize = None if precision.parameters is None else precision.parameters.itemsize
    # linears between which the model's code runs on a shard of features
    tp_plan = spec.tensor_parallel_plan()
    splits = {pattern: style for pattern, style in tp_plan.items() if style in ("column", "row")}
    axis = TensorAxis(
        ranks=mesh.tp,
        splits=splits,
        data_ranks=mesh.dp,
        parameter_shards=mesh.dp_shard,
        parameter_itemsize=itemsize,
    )
    with precision.autocast():
        return experiment.shard.plan(model, inputs, axis)
