"""Realisation of a plan: every leaf module that the plan changes gets a class that runs it as planned.

As with regions, the class is a dynamic subclass: names, hooks and `state_dict` keys stay. A sharded parameter
becomes a `DTensor` of the mesh axis, which FSDP2 shards further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from strategies.base import StrategyError
from strategies.regions.blocks import Disguised
from strategies.regions.disguise import disguise
from strategies.shard.candidates.execution import redistribute
from strategies.shard.candidates.layout import local_part
from strategies.shard.candidates.redistribution import Steps, steps_between
from strategies.shard.model.graph import PythonState, kind_of_inputs
from strategies.shard.model.shard_plan import PlacedModule, ShardPlan
from strategies.tracing.guard import Guard, module_at, refuse_global_hooks
from strategies.tracing.module_state import held_by
from strategies.tracing.shadow import PARTS

_PLACED = "_acbench_placed"
_Reductions: TypeAlias = Mapping[str, Steps]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """The code around the forward of one leaf module."""

    plan: PlacedModule
    mesh: DeviceMesh

    def run(self, module: nn.Module, body: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return what `module` gives, in the state that the option promises.

        Args:
            module: module whose parameters are used.
            body: forward of the plain module.
            args: the input, in the state in which it arrives.
            kwargs: the input, if it is given by name.

        Raises:
            StrategyError: the input is not what was planned for.
        """
        entered = self._entered(*args, *kwargs.values())
        option, candidate = self.plan.option, self.plan.candidate
        entering, finish, leaving = option.entering, candidate.finish, option.leaving
        entered = redistribute(entered, forward=entering.forward, backward=entering.backward, mesh=self.mesh)
        reductions = {name: held.reduction for name, held in candidate.parameters.items()}
        parameters = _reduced(module, reductions, self.mesh)
        bias = parameters.get("bias")
        is_partial = bool(finish.forward)
        if is_partial and bias is not None:
            parameters["bias"] = None  # every rank would add it
        with _holding(module, parameters):
            output = body(entered)
        output = redistribute(output, forward=finish.forward, backward=finish.backward, mesh=self.mesh)
        if is_partial and bias is not None:
            output = output + bias.to(output.dtype)
        return redistribute(output, forward=leaving.forward, backward=leaving.backward, mesh=self.mesh)

    def on_shadow(self, body: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return what `run` does, of tensors without memory, where `body` is the plain module.

        Raises:
            StrategyError: the input is not what was planned for.
        """
        entered = self._entered(*args, *kwargs.values())
        whole = entered.new_empty(self.plan.whole_shape).requires_grad_(entered.requires_grad)
        output = body(whole)
        part = output.new_empty(self.plan.output_shape).requires_grad_(output.requires_grad)
        return part.clone()  # which code may change in place

    def _entered(self, entered: Tensor) -> Tensor:
        if tuple(entered.shape) != self.plan.shape:
            problem = f"{self.plan.fqn!r} is sharded for inputs of {self.plan.shape} on a rank"
            problem += f", got {tuple(entered.shape)}; use batches of one shape"
            raise StrategyError("shard", problem)
        return entered


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """The code around the forward of the whole model: the plan holds for one answer of Python.

    Fields:
        python: what the planned forward asked.
        frozen: FQNs of parameters whose gradients nobody makes whole, as they have none.
    """

    python: PythonState
    guard: Guard
    frozen: tuple[str, ...]

    def run(self, module: nn.Module, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `body(*args, **kwargs)`.

        Raises:
            StrategyError: inputs, or what forward reads of modules, are not what was planned for.
        """
        self.check(module, args, kwargs)
        return body(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call that was not planned for."""
        refuse_global_hooks("shard")
        if kind_of_inputs(args, kwargs) != self.python.inputs:
            problem = "the model is called with inputs of another structure or shape, with another constant"
            problem += ", with one tensor in two places, or with inputs that want gradients"
            raise StrategyError("shard", f"{problem}, than it was sharded for; use inputs like the sample")
        changed = self.guard.changed(module)
        if changed is not None:
            problem = f"{changed!r}, which forward reads, is not what it was when the model was sharded"
            raise StrategyError("shard", f"{problem}; change it before, and plan for it")
        for fqn in self.frozen:
            home, _, name = fqn.rpartition(".")
            owner = module_at(module, home)
            held = None if owner is None else held_by(owner, name)
            if isinstance(held, nn.Parameter) and held.requires_grad:
                problem = f"{fqn!r} wants a gradient, which it did not when the model was sharded"
                raise StrategyError("shard", f"{problem}; thaw it before, and plan for it")


class _PlacedForward(Disguised):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_PLACED](self, super().forward, *args, **kwargs)  # type: ignore[misc]


def realise(model: nn.Module, plan: ShardPlan, mesh: DeviceMesh) -> nn.Module:
    """Return `model`, the leaf modules of which run as planned; changed in place, without communication.

    Args:
        model: plain model, with the same parameters on every rank.
        mesh: mesh of one axis, with the ranks of the plan.

    Raises:
        StrategyError: the mesh has another shape, the plan is that of another model, or the model carries a
            plan already.
    """
    if tuple(mesh.shape) != (plan.ranks,):
        raise StrategyError("shard", f"needs a mesh of {plan.ranks} ranks, got {tuple(mesh.shape)}")
    if any(isinstance(module, Disguised) for module in model.modules()):
        raise StrategyError("shard", "needs a plain model; apply it once, and before regions")
    _require_same(model, plan)
    for placed in plan.modules:
        if placed.is_plain:
            continue
        module = model.get_submodule(placed.fqn)
        for name, held in placed.candidate.parameters.items():
            if held.placement.is_shard():
                whole: nn.Parameter = getattr(module, name)
                part = local_part(
                    whole.detach(), (held.placement,), tuple(mesh.shape), [mesh.get_local_rank()]
                )
                local = part.contiguous().clone()
                sharded = DTensor.from_local(
                    local, mesh, (held.placement,), run_check=False, shape=whole.shape, stride=whole.stride()
                )
                parameter = nn.Parameter(sharded, requires_grad=whole.requires_grad)
                vars(parameter).update(vars(whole))  # what optimizers and users have noted on it
                setattr(module, name, parameter)
        stand = Placed(plan=placed, mesh=mesh)
        _disguise(module, stand.run)
        module.__dict__[PARTS] = stand.on_shadow
    for home, reductions in _by_module(plan).items():
        _disguise(model.get_submodule(home), partial(_run_reduced, reductions, mesh))
    if plan.python is not None:
        guard = Guard.of(model, (), plan.python.reads, is_exact=False)
        frozen = tuple(name for name, each in model.named_parameters() if not each.requires_grad)
        _disguise(model, Watched(python=plan.python, guard=guard, frozen=frozen).run)
    return model


def _require_same(model: nn.Module, plan: ShardPlan) -> None:
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in {**plan.shapes, **own}:
        here, there = own.get(name), plan.shapes.get(name)
        if here != there:
            shape = "no such parameter" if here is None else f"{here}"
            problem = f"the plan was made for a model in which {name!r} is {there or 'missing'}, got {shape}"
            raise StrategyError("shard", f"{problem}; plan this model")


def sum_gradients(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return `module`, changed in place so that gradients of its parameters are sums over a mesh of one axis.

    Each rank runs it on a shard, of heads for example, and so computes one summand.
    """
    reductions = {
        name: steps_between(
            (Partial(),),
            (Replicate(),),
            shape=tuple(parameter.shape),
            mesh_shape=tuple(mesh.shape),
            itemsize=parameter.element_size(),
        )
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    _disguise(module, partial(_run_reduced, reductions, mesh))
    return module


def _by_module(plan: ShardPlan) -> dict[str, _Reductions]:
    """Return what makes gradients whole, by module and parameter."""
    found: dict[str, dict[str, Steps]] = {}
    for placed in plan.parameters:
        home, _, name = placed.fqn.rpartition(".")
        found.setdefault(home, {})[name] = placed.option.leaving.backward
    return dict(found)


def _run_reduced(
    reductions: _Reductions,
    mesh: DeviceMesh,
    module: nn.Module,
    body: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return what `module` gives; each rank computes a summand of the gradients of these parameters."""
    with _holding(module, _reduced(module, reductions, mesh)):
        return body(*args, **kwargs)


def _reduced(module: nn.Module, reductions: _Reductions, mesh: DeviceMesh) -> dict[str, Tensor | None]:
    """Return the local parts of parameters, the gradients of which are reduced on their way back."""
    parameters: dict[str, Tensor | None] = {}
    for name, reduction in reductions.items():
        held: Tensor = getattr(module, name)
        local = held.to_local() if isinstance(held, DTensor) else held
        parameters[name] = redistribute(local, forward=(), backward=reduction, mesh=mesh)
    return parameters


@contextmanager
def _holding(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Let a module hold other tensors in the place of parameters; FSDP1 keeps these among its attributes."""
    places: dict[str, dict[str, Any]] = {
        name: module._parameters if name in module._parameters else vars(module)  # noqa: SLF001 (no public way to put a tensor there)
        for name in tensors
    }
    before = {name: place[name] for name, place in places.items()}
    try:
        for name, place in places.items():
            place[name] = tensors[name]
        yield
    finally:
        for name, place in places.items():
            place[name] = before[name]


def _disguise(module: nn.Module, run: Callable[..., Any]) -> None:
    if _PLACED in vars(module):
        module.__dict__[_PLACED] = partial(_run_both, run, vars(module)[_PLACED])
        return
    module.__dict__[_PLACED] = run
    disguise(module, _PlacedForward)


def _run_both(
    outer: Callable[..., Any],
    inner: Callable[..., Any],
    module: nn.Module,
    body: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    return outer(module, partial(inner, module, body), *args, **kwargs)
