"""The contract of sharding variants: they plan without a device, and realise the plan on a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from strategies.base import Tolerance
from strategies.shard.model import proof, realisation

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from strategies.shard.model.graph import TensorAxis
    from strategies.shard.model.shard_plan import ShardPlan

_REASON = (
    "ranks add their parts of a sum first, and then these to each other, which rounds otherwise; "
    "AdamW divides gradients by their size, those that are only rounding too"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """A decision how the operators of a model are sharded over one mesh axis.

    Subclasses are frozen dataclasses without state, as strategies are. A sharding is no strategy: it needs a
    mesh, and it is decided before the model has memory.

    Measured on the nano models over three steps of AdamW: gradients differ by 4e-7 in the first step, which
    grows to 2e-4 as the parameters, up to 6e-4 apart, take their own ways. In bf16 2e-2 becomes 1e-1.

    Attributes:
        tolerance: how far results may move in fp32; `None` where they are bitwise equal.
        reduced_tolerance: the same in half precision.
        step_tolerance: the same of one step in fp32, which proves the sharding for every precision.
    """

    tolerance: ClassVar[Tolerance | None] = Tolerance(
        relative=1e-3, parameters=1e-2, floor=1e-2, reason=_REASON
    )
    reduced_tolerance: ClassVar[Tolerance | None] = Tolerance(
        relative=1e-1, parameters=3e-1, floor=5e-2, reason=_REASON
    )
    step_tolerance: ClassVar[Tolerance | None] = Tolerance(relative=1e-4, floor=1e-3, reason=_REASON)

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> ShardPlan | None:
        """Return what is decided for `model`; nothing of it runs. `None`: as the mesh itself shards.

        Args:
            model: plain; on the meta device or any other.
            sample: positional inputs of one rank; meta tensors are enough.
            axis: mesh axis to shard over.

        Raises:
            StrategyError: the model is unsuitable, or no plan meets what is asked.
        """
        raise NotImplementedError

    def realise(
        self, model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, *, sample: tuple[Any, ...] | None = None
    ) -> nn.Module:
        """Return `model`, changed in place to run as `plan` says; without a sample without communication.

        Args:
            model: the one that was planned for, with the same parameters on every rank of the mesh.
            plan: what `plan` returned.
            mesh: mesh of one axis, with as many ranks.
            sample: positional inputs, the same on every rank of the mesh. With them the realised model is
                proven: it must do what the dense model does, which each rank computes once.

        Raises:
            StrategyError: the mesh has another shape, the model carries a plan or a region already, or does
                something else than the dense model.
        """
        if sample is None:
            return realisation.realise(model, plan, mesh)
        is_reduced = any(each.dtype in {torch.float16, torch.bfloat16} for each in model.parameters())
        tolerance = self.reduced_tolerance if is_reduced else self.step_tolerance
        realise = partial(realisation.realise, model, plan, mesh)
        assert tolerance is not None
        return proof.proven(realise, model, sample, tolerance=tolerance, mesh=mesh)
