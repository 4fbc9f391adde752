"""The region of nested AC: a module's forward, run as the program of its regions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from strategies.base import Observation
from strategies.errors import StrategyError
from strategies.nested.nested_regions import NestedRegion, Path, every_region, path_name
from strategies.nested.program import (
    NestedProgram,
    kind_of,
    kind_of_input,
    make_program,
    record,
)
from strategies.nested.region_code import Treatment
from strategies.nested.scopes import Labels, Layout, Scope, lay_out
from strategies.regions.blocks import submodule
from strategies.regions.offload_kinds import OffloadKind
from strategies.regions.offloading import HostLedger, Offloading
from strategies.regions.region import enclose, refuse_own_forward
from strategies.tracing.shadow import Shadow, device_of, shadowed

PROGRAMS = 64
"""Kinds of input whose programs are kept; the one that was not used for longest gives way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nest:
    """What is to be done to one model, and the notes of doing it.

    Fields:
        labels: labels of its submodules.
        options: keyword arguments of `torch.utils.checkpoint.checkpoint`.
        offload: what of a region waits in host memory, by the region's path.
        kept: regions that are not recomputed.
        ledger: ledger of the host copies.
    """

    labels: Labels
    options: Mapping[str, Any]
    offload: Mapping[Path, OffloadKind]
    kept: frozenset[Path]
    ledger: HostLedger = field(default_factory=HostLedger)


class NestedForward:
    """The region around a forward that holds regions; the model's own waits for its first call.

    Args:
        nest: what is to be done.
        scope: scope of the module it stands around; `None` on a model whose forward holds no region itself.
        layout: layout of the whole model, on its outermost module, once it is known.
        shadow: shadow of the module, made while its parameters still had their shapes.
    """

    def __init__(
        self,
        nest: Nest,
        *,
        scope: Scope | None = None,
        layout: Layout | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        self.layout = layout
        self.offloadings: dict[Path, Offloading] = {}
        self._nest = nest
        self._scope = scope
        self._shadow = shadow
        self._programs: dict[Hashable, NestedProgram] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self._nest, self._scope, self.layout)

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, with the regions in it recomputed where gradients are asked for.

        Raises:
            StrategyError: the forward cannot be recorded for inputs of this kind.
        """
        if not torch.is_grad_enabled():
            return body(*args, **kwargs)
        if self._scope is None and self.layout is None:
            with _unwatched():
                self.lay_out(module, args, kwargs)
        if self._scope is None:
            return body(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        kind = kind_of(module, self._scope, leaves, structure)
        program = self._programs.get(kind)
        if program is None or not program.fits(module):
            with _unwatched():
                program = self.program(module, args, kwargs)
        self._programs.pop(kind, None)
        self._programs[kind] = program  # the latest comes last
        if len(self._programs) > PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program([leaf for leaf in leaves if isinstance(leaf, Tensor)])

    def lay_out(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[NestedProgram]:
        """Find the regions of `model`, and put a region around each forward that holds some.

        Returns:
            The program of each such forward, outer modules first.

        Raises:
            StrategyError: the labels do not fit the model, or a forward with regions cannot be recorded.
        """
        leaves = tree_leaves((args, kwargs))
        for leaf in leaves:
            kind_of_input(leaf)
        shadow = self._shadow_of(model)
        device = device_of(leaves)
        fake = shadow.on(device)
        layout, inputs = lay_out(fake, self._nest.labels, *shadowed(fake, (args, kwargs), device))
        _refuse_unknown(layout, self._nest)
        forwards = [
            (self._of(scope, shadow), submodule(model, scope.fqn), inputs[scope.fqn])
            for scope in layout.scopes
        ]
        refuse_own_forward(
            {scope.fqn: module for (_, module, _), scope in zip(forwards, layout.scopes, strict=True)}
        )
        programs = [forward.program(module, *given) for forward, module, given in forwards]
        for forward, module, _ in forwards:
            if forward is not self:
                enclose(module, forward, holds_call=False)
        self.layout = layout
        return programs

    def program(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NestedProgram:
        """Return the program of `module` for inputs of this kind.

        Raises:
            StrategyError: its forward cannot be recorded.
        """
        assert self._scope is not None
        device = device_of(tree_leaves((args, kwargs)))
        shadow = self._shadow_of(module).on(device)
        recording = record(shadow, self._scope, *shadowed(shadow, (args, kwargs), device))
        treatment = Treatment(
            options=self._nest.options,
            wraps={path: partial(self._offloaded, path) for path in self._nest.offload},
            kept=self._nest.kept,
        )
        return make_program(recording, self._scope, module, treatment)

    def looked_through(self) -> list[str]:
        """Return the plain FQNs of the modules whose calls the code goes around."""
        scope = self._scope
        return [] if scope is None else [f"{scope.fqn}.{fqn}".lstrip(".") for fqn in sorted(scope.through)]

    def observe(self) -> Observation:
        """Return the bytes that the latest step moved, over all regions of the model."""
        return Observation(offloaded_bytes=self._nest.ledger.offloaded_bytes)

    def plan(self, offloadings: Mapping[Path, Offloading]) -> dict[str, Any] | None:
        """Return the regions of the model as JSON values; `None` before they are known."""
        if self.layout is None:
            return None
        calls, nest = self.layout.calls, self._nest

        def described(region: NestedRegion) -> dict[str, Any]:
            offloading = offloadings.get(region.path)
            return {
                "region": region.name,
                "first": calls[region.start],
                "last": calls[region.stop - 1],
                "calls": region.stop - region.start,
                "recomputed": region.path not in nest.kept,
                "offload": nest.offload.get(region.path),
                "moved_bytes": 0 if offloading is None else offloading.moved_bytes,
                "fetched_bytes": 0 if offloading is None else offloading.fetched_bytes,
                "regions": [described(inner) for inner in region.regions],
            }

        return {"regions": [described(region) for region in self.layout.regions]}

    def _of(self, scope: Scope, shadow: Shadow) -> NestedForward:
        if not scope.fqn:
            self._scope = scope
            return self
        return NestedForward(self._nest, scope=scope, shadow=Shadow.of(shadow.model.get_submodule(scope.fqn)))

    def _shadow_of(self, module: nn.Module) -> Shadow:
        """Return the shadow of `module` as it is now; its parameters as they were, where units hide them."""
        units = (each for each in module.modules() if isinstance(each, FSDPModule | FullyShardedDataParallel))
        has_units = any(unit is not module for unit in units)
        self._shadow = Shadow.of(module, self._shadow if has_units else None)
        return self._shadow

    def _offloaded(self, path: Path, code: fx.GraphModule) -> nn.Module:
        kind = self._nest.offload[path]
        offloading = self.offloadings.setdefault(path, Offloading(ledger=self._nest.ledger, kind=kind))
        return OffloadedCode(code, offloading)


class OffloadedCode(nn.Module):
    """The code of a region, with what autograd saves of it in host memory."""

    def __init__(self, code: fx.GraphModule, offloading: Offloading) -> None:
        super().__init__()
        self.code = code
        self.offloading = offloading

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the code returns."""
        return self.offloading(self.code, self.code, inputs, {})  # it holds the modules that it calls


@contextmanager
def _unwatched() -> Iterator[None]:
    """Keep what is recorded out of the step: from modes that measure it, and from a region that saves it."""
    # a result that is saved as it is would hold itself, by its own graph, and never be freed
    with _disable_current_modes(), saved_tensors_hooks(_detached, _itself):
        yield


def _detached(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():  # noqa: SLF001 (nobody shall record this)
        return tensor.detach()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _copied(nest: Nest, scope: Scope | None, layout: Layout | None) -> NestedForward:
    return NestedForward(nest, scope=scope, layout=layout)


def _refuse_unknown(layout: Layout, nest: Nest) -> None:
    known = [region.path for region in every_region(layout.regions)]
    for where, paths in (("ac.keep", nest.kept), ("ac.offload", nest.offload)):
        for path in paths:
            if path not in known:
                names = ", ".join(map(path_name, known)) or "none"
                raise StrategyError(where, f"there is no region {path_name(path)}; regions are: {names}")
