"""A module's forward with its regions, recorded once for each kind of input."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import TreeSpec, tree_unflatten

from strategies.errors import StrategyError
from strategies.nested.region_code import Treatment, lower
from strategies.nested.scopes import Scope
from strategies.regions.blocks import submodule
from strategies.tracing.function_graph import FunctionRecorder, Recording
from strategies.tracing.module_state import CONSTANTS
from strategies.tracing.recorder import leaves_of, value_read
from strategies.tracing.shadow import Shadow
from strategies.tracing.without_data import following


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedProgram:
    """The code of a forward, for one kind of input.

    Fields:
        name: name of the module whose forward it is, for readers.
        recording: what it was made of.
        code: takes the tensors among the inputs and returns the tensors among the outputs.
        modules: the submodules that `code` calls, by their FQN below the module.
        reads: what the forward read of modules, and found there.
    """

    name: str
    recording: Recording
    code: fx.GraphModule
    modules: Mapping[str, nn.Module]
    reads: Mapping[tuple[str, str], object]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return what forward returns."""
        leaves = leaves_of(self.recording.outputs, self.code(*tensors))
        return tree_unflatten(leaves, self.recording.structure)

    def fits(self, module: nn.Module) -> bool:
        """Whether the code is still that of `module`: a wrapper may be new, a number be another."""
        return all(value_read(module, *place) == value for place, value in self.reads.items()) and all(
            submodule(module, fqn) is held for fqn, held in self.modules.items()
        )


def record(shadow: Shadow, scope: Scope, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recording:
    """Return the forward of a shadow's model.

    Args:
        shadow: shadow of the module of `scope`, with fake tensors.
        scope: says what is looked into.
        args, kwargs: inputs, tensors of the shadow.

    Raises:
        StrategyError: forward does what a graph cannot hold, or depends on data.
    """
    with following(lambda: scope.name):
        return FunctionRecorder(shadow, scope.through, scope.name).record(args, kwargs)


def make_program(
    recording: Recording, scope: Scope, module: nn.Module, treatment: Treatment
) -> NestedProgram:
    """Return the code of `recording` over the submodules of `module`.

    Raises:
        StrategyError: a region does not nest or cannot be recomputed, or begins inside a module with hooks.
    """
    for fqn in sorted(scope.through):
        _refuse_hooks(f"{scope.fqn}.{fqn}".lstrip("."), submodule(module, fqn))
    modules: dict[str, nn.Module] = {}

    def called(fqn: str) -> nn.Module:
        modules[fqn] = submodule(module, fqn)
        return modules[fqn]

    return NestedProgram(
        name=scope.name,
        recording=recording,
        code=lower(recording, scope, called, treatment),
        modules=modules,
        reads={place: value_read(module, *place) for place in recording.reads},
    )


def _refuse_hooks(fqn: str, module: nn.Module) -> None:
    """Refuse to go around the call of a module that does more than its forward."""
    is_unit = isinstance(module, FSDPModule | FullyShardedDataParallel)
    if is_unit or _has_hooks(module):
        what = "an FSDP unit" if is_unit else "a module with hooks"
        problem = f"a region begins inside {fqn!r}, {what}, and ends outside of it"
        raise StrategyError("ac.labels", f"{problem}, or the other way round; end it with {fqn!r}")


def _has_hooks(module: nn.Module) -> bool:
    kinds = "forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"
    return any(vars(module)[f"_{kind}"] for kind in kinds)


def kind_of(module: nn.Module, scope: Scope, leaves: list[Any], structure: TreeSpec) -> Hashable:
    """Return what decides how the forward of `module` runs, its inputs' values left out.

    Raises:
        StrategyError: an input is neither a tensor nor a constant.
    """
    looked_into = [submodule(module, fqn) for fqn in sorted(scope.through)]
    places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return (
        structure,
        tuple(kind_of_input(leaf) for leaf in leaves),
        tuple(places.get(id(leaf)) for leaf in leaves),  # a forward may ask whether two inputs are one
        # what submodules give follows from these too, and forward may ask for its dtype
        tuple(inner.training for inner in module.modules()),
        tuple((held.dtype, held.requires_grad) for held in chain(module.parameters(), module.buffers())),
        tuple(_has_hooks(inner) for inner in looked_into),
        tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ),
    )


def kind_of_input(leaf: Any) -> Hashable:
    """Return what decides how a forward runs with the input `leaf`.

    Raises:
        StrategyError: it is neither a dense tensor nor a constant.
    """
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise StrategyError(
                "ac", "forward is called with a sparse or nested tensor, which no graph can hold"
            )
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, CONSTANTS):
        return type(leaf), leaf
    raise StrategyError("ac", f"forward is called with a {type(leaf).__name__}, which no graph can hold")
