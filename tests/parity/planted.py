"""Shardings with an error in them, of the kinds that a training loss does not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from strategies.shard.base import Sharding
from strategies.shard.candidate import OneCandidate
from strategies.shard.candidates.redistribution import steps_between
from strategies.shard.megatron import Megatron
from strategies.shard.model.graph import TensorAxis
from strategies.shard.model.shard_plan import PlacedModule, ShardPlan

_ATTENTION, _ROW, _NORM = "layers.0.attention", "layers.0.feed_forward.down", "layers.1.feed_forward_norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted(Sharding):
    """Megatron's sharding, or queries and keys by batch, with the error of that name; none without one."""

    error: str | None = None

    def plan(self, model: nn.Module, sample: tuple[Any, ...], axis: TensorAxis) -> ShardPlan:
        by_batch = OneCandidate(candidate="S0R = S0R x RR_0", modules="*.w[qk]")
        right = (by_batch if self.error == _WEIGHT else Megatron()).plan(model, sample, axis)
        if self.error is None or self.error not in _IN_PLANS:
            return right
        fqns, change = _IN_PLANS[self.error]
        return replace(
            right, modules=tuple(change(each) if each.fqn in fqns else each for each in right.modules)
        )

    def realise(
        self, model: nn.Module, plan: ShardPlan, mesh: DeviceMesh, *, sample: tuple[Any, ...] | None = None
    ) -> nn.Module:
        if self.error == "two ranks have each other's shards":
            weight = model.get_parameter(f"{_ATTENTION}.wq.weight")
            weight.data = weight.data.roll(len(weight) // 2, 0)
        if self.error == "a bias is dropped":
            model.get_submodule(_ROW).register_forward_hook(_without_bias)
        # not by `super()`: slots=True makes a new class, so a bare one would look at the one it replaced
        return Sharding.realise(self, model, plan, mesh, sample=sample)


def _without_bias(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    assert isinstance(module.bias, Tensor)
    return output - module.bias.to(output.dtype)


def _no_gradient_reduction(placed: PlacedModule) -> PlacedModule:
    return replace(
        placed, option=replace(placed.option, entering=replace(placed.option.entering, backward=()))
    )


def _with_reductions(placed: PlacedModule, reduced: Callable[[str], Any]) -> PlacedModule:
    candidate = placed.option.candidate
    assert candidate is not None
    held = {name: replace(each, reduction=reduced(name)) for name, each in candidate.parameters.items()}
    return replace(placed, option=replace(placed.option, candidate=replace(candidate, parameters=held)))


def _all_reduced(_name: str) -> Any:
    return steps_between((Partial(),), (Replicate(),), shape=(32,), mesh_shape=(2,), itemsize=4)


_WEIGHT = "the all-reduce of the weight gradients of queries and keys is lost"
_IN_PLANS: Mapping[str, tuple[set[str], Callable[[PlacedModule], PlacedModule]]] = {
    "the all-reduce of the input gradient of queries is lost": (
        {f"{_ATTENTION}.wq"},
        _no_gradient_reduction,
    ),
    _WEIGHT: (
        {f"{_ATTENTION}.wq", f"{_ATTENTION}.wk"},
        partial(_with_reductions, reduced=lambda _name: ()),
    ),
    "the gradient of a norm is doubled": ({_NORM}, partial(_with_reductions, reduced=_all_reduced)),
}
ERRORS = (*_IN_PLANS, "a bias is dropped", "two ranks have each other's shards")
