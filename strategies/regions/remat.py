"""Regions of the optional package `torch-remat`: recomputed, but for submodules that keep activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_remat
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.base import Observation
from strategies.generators import State, of_devices, put
from strategies.regions import region
from strategies.regions.blocks import plain_named_modules
from strategies.regions.outside_tensors import OutsideTensors
from strategies.regions.own_parameters import with_own_parameters
from strategies.regions.region import Unobserved


@dataclass(kw_only=True, slots=True)
class Remat(Unobserved):
    """A region whose activations are dropped in forward and computed again in backward, to its end.

    Fields:
        preserve_rng_state: recompute with the random numbers of forward. Compiled code does so by itself.
        has_run: whether forward has called it uncompiled.
        fqn: name of the module in the model, for messages; empty where that is not known.
    """

    preserve_rng_state: bool
    has_run: bool = False
    fqn: str = ""
    _outside: OutsideTensors = field(default_factory=OutsideTensors)

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, recomputed in backward where gradients are asked for."""
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.has_run = True
            found = self._outside.found_by(module, (*args, *kwargs.values()), self.fqn)
            body = with_own_parameters(module, found.following(body), found.held)
        if torch.compiler.is_compiling() or not self.preserve_rng_state:
            return torch_remat.checkpoint()(body)(*args, **kwargs)
        numbers = RandomNumbers(tree_leaves((args, kwargs)))
        return torch_remat.checkpoint(recompute_state_hooks=(numbers,))(body)(*args, **kwargs)


@dataclass(kw_only=True, slots=True)
class KeptRegion:
    """A region inside a `Remat` that is not recomputed: what autograd saves of it stays, and its outputs.

    Fields:
        name: name of its module inside the block.
        has_run: whether forward has called it uncompiled.
    """

    name: str
    outer: Remat
    has_run: bool = False

    def __call__(
        self, _module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, and in a recomputation what it returned in forward."""
        if not torch.compiler.is_compiling():
            self.has_run = True
        outputs = torch_remat.region(body, self.name, recompute=False)(*args, **kwargs)
        torch_remat.recompute_needs_tensor(
            *(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        )
        return outputs

    def observe(self) -> Observation:
        """Return the module as what is named, and whether the block left it out; compiled code hides that."""
        is_missed = self.outer.has_run and not self.has_run
        return Observation(named=(self.name,), never_fired=(self.name,) if is_missed else ())


def keep(block: nn.Module, names: Iterable[str], outer: Remat) -> None:
    """Put a region around each of the submodules `names` of a block that `outer` recomputes."""
    modules = dict(plain_named_modules(block))
    for name in names:
        region.enclose(modules[name], KeptRegion(name=name, outer=outer), holds_call=False)


class RandomNumbers:
    """The states of torch's generators on the CPU and on the devices of some values; meters see them.

    A `RecomputeStateHook` of torch-remat, which by itself lets a recomputation draw further numbers.

    Args:
        values: those that are tensors name the devices.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._sources = of_devices(value.device for value in values if isinstance(value, Tensor))

    def snapshot(self) -> list[State]:
        """Return the state of each generator."""
        return [each.now(is_seen=True) for each in self._sources]

    def restore(self, states: list[State]) -> None:
        """Put each generator into the state of a snapshot."""
        put(states)
