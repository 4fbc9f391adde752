"""Realisation of a plan: every leaf module that the plan changes gets a class that runs it as planned.

As with regions, the class is exchanged for a dynamic subclass: names, hooks and `state_dict` keys stay.
What is sharded becomes a `DTensor` parameter of the mesh axis, which FSDP2 shards further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strategies.blocks import Disguised
from strategies.errors import StrategyError
from strategies.shard.execution import redistribute
from strategies.shard.layout import local_part
from strategies.shard.plans import ShardPlan
from strategies.shard.ways import Held, Option

_ATTRIBUTE = "_acbench_placed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """What stands around the forward of one leaf module.

    Fields:
        option: its own.
        mesh: of one axis.
    """

    option: Option
    mesh: DeviceMesh

    def run(self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
        """Return what `module` gives, in the state that the option promises.

        Args:
            module: whose parameters are used.
            body: its own forward, a function of the module and its input.
            args: the input.
        """
        way = self.option.way
        assert way is not None
        entering, finish, leaving = self.option.entering, way.finish, self.option.leaving
        (entered,) = args
        entered = redistribute(entered, forward=entering.forward, backward=entering.backward, mesh=self.mesh)
        parameters = {
            name: self._used(parameter, way.parameters[name])
            for name, parameter in module.named_parameters(recurse=False)
        }
        bias = parameters.get("bias")
        is_partial = bool(finish.forward)
        if is_partial and bias is not None:
            parameters["bias"] = None  # every rank would add it
        output: Tensor = body(_Stand(module, parameters), entered)
        output = redistribute(output, forward=finish.forward, backward=finish.backward, mesh=self.mesh)
        if is_partial and bias is not None:
            output = output + bias.to(output.dtype)
        return redistribute(output, forward=leaving.forward, backward=leaving.backward, mesh=self.mesh)

    def _used(self, parameter: Tensor, held: Held) -> Tensor | None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return redistribute(local, forward=(), backward=held.reduction, mesh=self.mesh)


class _Stand:
    """A module with other parameters, for its forward to read."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor | None]) -> None:
        self._module = module
        self.__dict__.update(parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _PlacedForward(Disguised):
    def forward(self, *args: Any) -> Tensor:
        placed: Placed = vars(self)[_ATTRIBUTE]
        return placed.run(self, super().forward.__func__, args)  # type: ignore[misc, arg-type]


def realise(model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, *, where: str) -> nn.Module:
    """Return `model`, the leaf modules of which run as planned; changed in place, without communication.

    Args:
        model: plain, with the same parameters on every rank.
        plan: of this model.
        mesh: of one axis, with the ranks of the plan.
        where: configuration path of the strategy, for messages.

    Raises:
        StrategyError: the mesh has another shape, or the model carries a plan already.
    """
    if tuple(mesh.shape) != (plan.ranks,):
        raise StrategyError(where, f"needs a mesh of {plan.ranks} ranks, got {tuple(mesh.shape)}")
    if any(isinstance(module, Disguised) for module in model.modules()):
        raise StrategyError(where, "needs a plain model; apply it once, and before regions")
    for placed in plan.modules:
        if placed.is_plain:
            continue
        module = model.get_submodule(placed.fqn)
        assert placed.option.way is not None
        for name, held in placed.option.way.parameters.items():
            if held.placement.is_shard():
                _shard(module, name, held, mesh)
        module.__dict__[_ATTRIBUTE] = Placed(option=placed.option, mesh=mesh)
        cls: Any = type(module)
        module.__class__ = _placed_class(cls)
    return model


def _shard(module: nn.Module, name: str, held: Held, mesh: DeviceMesh) -> None:
    whole: nn.Parameter = getattr(module, name)
    part = local_part(whole.detach(), (held.placement,), tuple(mesh.shape), [mesh.get_local_rank()])
    local = part.contiguous().clone()
    sharded = DTensor.from_local(
        local,
        mesh,
        (held.placement,),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    setattr(module, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))


@cache  # one class per class, so that identical blocks stay identical
def _placed_class(original: type[Any]) -> type[nn.Module]:
    return type(f"Placed{original.__name__}", (_PlacedForward, original), {"__module__": original.__module__})
