"""Regions: callables around a module's forward, put there without renaming anything.

The module's class is replaced by a dynamic subclass, as FSDP2's `fully_shard` does. Parameters,
buffers, submodules, hooks and `state_dict` keys stay where they are, because the module does.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FSDPModule

from strategies.base import Observation, StrategyError
from strategies.regions.blocks import Enclosed, plain_class, plain_named_modules
from strategies.regions.disguise import disguise, disguised

_ATTRIBUTE = "_acbench_region"
_MARK = "_acbench_enclosed"

_OWN_CHECKPOINTING = {  # flag of a module -> the calls that clear it, of which the model has one
    "gradient_checkpointing": (
        "activation_checkpointing_disable()",  # transformers since 5.16, which deprecates the older name
        "gradient_checkpointing_disable()",
    ),
    "grad_checkpointing": ("set_grad_checkpointing(False)",),  # timm
}


_METHOD = "make it a method of the module's class, or of a module that holds this one"


class Region(Protocol):
    """The code that runs in place of one module's forward, and the notes it takes."""

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any:
        """Return `body(*args, **kwargs)`, having arranged what autograd keeps of it.

        Args:
            module: the module the region stands around, for its parameters and buffers.
            body: the module's own forward (or call, when its sharding hooks belong inside).
            args: positional inputs of the call.
            kwargs: keyword inputs of the call.
        """

    def observe(self) -> Observation:
        """Return what the latest step showed in this region."""


class Unobserved:
    """A region that decides nothing of its own, so that a step shows nothing in it."""

    __slots__ = ()

    def observe(self) -> Observation:
        """Return nothing."""
        return Observation()


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """A region around a region: what `inner` saves for backward, `outer` packs."""

    outer: Region
    inner: Region

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, run by `inner` inside `outer`."""
        return self.outer(module, lambda *a, **k: self.inner(module, body, a, k), args, kwargs)

    def observe(self) -> Observation:
        """Return the operators that `inner` saw and the bytes that `outer` moved."""
        return replace(self.inner.observe(), offloaded_bytes=self.outer.observe().offloaded_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class InScope:
    """A forward that runs in a scope, which may be entered again.

    Fields:
        scope: entered before each forward and left after it.
        shown: the region that says what the latest step showed; without one nothing is counted.
    """

    scope: AbstractContextManager[Any]
    shown: Region | None = None

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002 (`body` is bound to it)
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `body(*args, **kwargs)`, run in the scope."""
        with self.scope:
            return body(*args, **kwargs)

    def observe(self) -> Observation:
        """Return what `shown` has seen."""
        return Observation() if self.shown is None else self.shown.observe()


class RegionCallSite:
    """A model called through one region, or through none; the model stays untouched."""

    def __init__(self, model: nn.Module, region: Region | None) -> None:
        self.model = model
        self.region = region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `model(*args, **kwargs)`, run as one region."""
        if self.region is None:
            return self.model(*args, **kwargs)
        return self.region(self.model, self.model, args, kwargs)

    def observe(self) -> Observation:
        """Return what the latest step showed in the region."""
        return self.region.observe() if self.region is not None else Observation()


def enclose(module: nn.Module, region: Region, *, holds_call: bool = True) -> None:
    """Put `region` around `module`, in place, or in the place of the one that is there.

    On a module that FSDP2 shards the region holds the whole call, so that gathering the parameters
    is repeated in recomputation; everywhere else it holds `forward`, and hooks stay outside.

    Args:
        module: plain or sharded.
        holds_call: false for a region that holds `forward` on a sharded module too.
    """
    has_region = _ATTRIBUTE in vars(module)
    module.__dict__[_ATTRIBUTE] = region
    if has_region:
        return
    mixin = _EnclosedCall if holds_call and isinstance(module, FSDPModule) else _EnclosedForward
    disguise(module, mixin)


def mark(model: nn.Module) -> None:
    """Take note that `model` is checkpointed by other means than regions, for `refuse_enclosed`."""
    model.__dict__[_MARK] = True


def region_of(module: nn.Module) -> Region | None:
    """Return the region around `module` itself, `None` where there is none."""
    found: Region | None = vars(module).get(_ATTRIBUTE)
    return found


def regions(model: nn.Module) -> dict[str, Region]:
    """Return `{plain FQN: region}` of the enclosed modules of `model`."""
    return {
        name: vars(module)[_ATTRIBUTE]
        for name, module in plain_named_modules(model)
        if isinstance(module, Enclosed)
    }


def refuse_enclosed(model: nn.Module) -> None:
    """Refuse a model that carries a region or a wrapper of torch already, or checkpoints by itself.

    Raises:
        StrategyError: naming the first such module.
    """
    for name, module in plain_named_modules(model):
        where = name or plain_class(module).__name__
        if isinstance(module, Enclosed | ActivationWrapper) or _MARK in vars(module):
            raise StrategyError("ac", f"{where!r} is already checkpointed; apply one variant to a model")
        for flag, calls in _OWN_CHECKPOINTING.items():
            if getattr(module, flag, False) is True:
                has_method = (each for each in calls if hasattr(model, each.partition("(")[0]))
                remedy = next(has_method, calls[-1])
                raise StrategyError("ac", f"{where!r} has {flag} on; call {remedy} on the model before")


def refuse_own_forward(blocks: Mapping[str, nn.Module]) -> None:
    """Refuse blocks with a `forward` set on the instance, which would win over that of the region's class.

    FSDP2 blocks pass: there the region holds the whole call.

    Raises:
        StrategyError: naming the first such block.
    """
    for fqn, block in blocks.items():
        if "forward" in vars(block) and not isinstance(block, FSDPModule):
            problem = f"{fqn!r} has a forward set on the instance, which no region can hold"
            raise StrategyError("ac", f"{problem}; {_METHOD}")


class _EnclosedForward(Enclosed):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        region: Region = vars(self)[_ATTRIBUTE]
        return region(self, super().forward, args, kwargs)  # type: ignore[misc, arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        original = type(self).__bases__[-1]
        if issubclass(original, _EnclosedForward):  # a class of the user's, or of a meter, on top of ours
            return copyreg.__newobj__, (type(self),), dict(vars(self))  # type: ignore[attr-defined]
        return _rebuild, (original,), dict(vars(self))


class _EnclosedCall(Enclosed):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region: Region = vars(self)[_ATTRIBUTE]
        return region(self, super().__call__, args, kwargs)  # type: ignore[misc, arg-type]


def _rebuild(original: Any) -> nn.Module:
    enclosed = disguised(_EnclosedForward, original)  # what FSDP2 shards is not copied
    return enclosed.__new__(enclosed)
