"""Decisions that all models of a trial on one rank share, made once, before the first of them is built."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.experiment.experiment import Experiment
from harness.measure.routing import RoutingLog
from harness.trial.compilation import Backends
from harness.trial.plan_sharding import plan_sharding
from harness.trial.stages import Cut
from strategies.shard.model.shard_plan import ShardPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """The decisions that the models of a trial share.

    Fields:
        sharding: plan of the sharding variant; `None`: the mesh alone shards.
        backends: compile the models; those of one experiment share what is compiled.
        chunks: plans of chunks; models that are alike share one.
        cuts: how models are cut into stages, by their dtype.
        routing: notes what the routers of all models do, where ranks share experts.
    """

    sharding: ShardPlan | None = None
    backends: Backends = field(default_factory=Backends)
    chunks: MutableMapping[str, Any] = field(default_factory=dict)
    cuts: MutableMapping[str, Cut] = field(default_factory=dict)
    routing: RoutingLog = field(default_factory=RoutingLog)

    @classmethod
    def of(cls, experiment: Experiment, inputs: tuple[Any, ...], device: torch.device) -> Build:
        """Return what is decided for `experiment`.

        Args:
            inputs: inputs of one rank; meta tensors are enough.
            device: on which the trial runs.

        Raises:
            StrategyError: the sharding variant does not fit the model.
        """
        return cls(sharding=plan_sharding(experiment, inputs, device))
