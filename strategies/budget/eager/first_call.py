"""The region around a model that plans itself when it is first called to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves

from strategies import generators
from strategies.base import RunnableStep, StrategyError
from strategies.budget.eager import carrying_out
from strategies.budget.eager.planned_block import refuse_compiled
from strategies.budget.plan import Plan
from strategies.estimate.liveness import storage_bytes
from strategies.estimate.tensors import tensors_held_by
from strategies.regions.blocks import Chunked, ModelModules, plain_named_modules
from strategies.regions.own_parameters import weights_of
from strategies.regions.region import Region, Unobserved
from strategies.regions.rewind import all_modules, python_state_kept
from strategies.regions.torch_facts import parameter_groups
from strategies.step.call_sizes import difference, input_sizes
from strategies.step.operator_mode import OperatorMode
from strategies.step.sizes import TensorSize
from strategies.tracing.following import as_with_data
from strategies.tracing.shadow import Shadow, device_of, shadowed, without_memory
from strategies.tracing.without_data import models_errors

_FIRST = "the first call plans on tensors without memory"
_FOLLOWED = f"{_FIRST}, on which the model raises"
_REMEDY = "write a plan of a step by Budget.write_plan and give it as ac.plan_file, as trials do"
_BUDGETS = frozenset({"ac.budget_gib", "ac.fraction"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of the operators that ranks run together."""


class PlansSteps(Protocol):
    """A maker of plans of steps."""

    def plan(self, step: RunnableStep) -> Plan:
        """Return the plan."""

    def within(self, nbytes: int) -> PlansSteps:
        """Return a maker of plans like this one, for a budget of so many bytes."""

    def blocks_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the blocks that a plan decides about, by plain FQN."""

    def modules_of(self, model: nn.Module) -> ModelModules:
        """Return all that a plan may decide about."""


class _Call(NamedTuple):
    """A call of the model, as a plan is made for it.

    Fields:
        sizes: sizes of the inputs.
        weights: shape of each parameter, and whether it gets a gradient.
        modes: whether each module trains; empty where the model itself does not.
        accumulates: whether gradients of earlier calls stand.
    """

    sizes: tuple[TensorSize, ...]
    weights: tuple[tuple[torch.Size, bool], ...]
    modes: tuple[bool, ...]
    accumulates: bool

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Return the call of `model` with these inputs."""
        weights = weights_of(model)
        return cls(
            input_sizes(args, kwargs),
            tuple([(each.shape, each.requires_grad) for each in weights]),
            tuple([each.training for each in all_modules(model)]) if model.training else (),
            any(each.is_leaf and each.grad is not None for each in weights),
        )

    def suits(self, other: _Call) -> bool:
        """Say whether a plan for this call keeps the budget in the other one: in evaluation, any plan."""
        return (
            self.weights == other.weights
            and other.modes in {self.modes, ()}
            and self.accumulates >= other.accumulates
            and difference(self.sizes, other.sizes) is None
        )


class _Inputs:
    """The arguments of a call, without memory. A copy of the model has none: they may be anything."""

    def __init__(self, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None) -> None:
        self.args, self.kwargs = args, kwargs or {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inputs:
        return _Inputs()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Inputs, ()


class _Made(NamedTuple):
    """A plan with what it was made for.

    Fields:
        call: the call.
        inputs: its arguments.
        plan: the plan.
        call_bytes: most bytes that one call of the model holds: its peak less parameters, buffers, inputs and
            the gradients that stand.
    """

    call: _Call
    inputs: _Inputs
    plan: Plan
    call_bytes: int


class _Awaited:
    """A call of the model whose backward has not run; lives as long as its graph waits."""


class _InFlight:
    """The calls of a model that wait for backward. A copy of the model has none."""

    def __init__(self) -> None:
        self._calls: list[ref[_Awaited]] = []

    def __len__(self) -> int:
        self._calls = [call for call in self._calls if call() is not None]
        return len(self._calls)

    def add(self, call: _Awaited) -> None:
        """Count a call as long as it lives."""
        self._calls.append(ref(call))

    def __deepcopy__(self, memo: dict[int, Any]) -> _InFlight:
        return _InFlight()

    def __reduce__(self) -> tuple[Any, ...]:
        return _InFlight, ()


@dataclass(kw_only=True, slots=True, eq=False)
class PlansAtFirstCall(Unobserved):
    """A region that plans on tensors without memory, for a step whose loss is the sum of the outputs.

    It plans anew where inputs are larger than any that it has planned for, and where parameters, what trains,
    or gradients that stand are others, so that the budget is kept. Its plans are for one call of the model: a
    further one, before backward of the first, needs room of its own.

    Fields:
        budget: makes the plan.
        plan: the plan; `None` until the model was called to train.
        inner: region of the plan around the same module.
    """

    budget: PlansSteps
    plan: Plan | None = None
    inner: Region | None = None
    _plans: list[_Made] = field(default_factory=list)
    _awaited: _InFlight = field(default_factory=_InFlight)

    def __call__(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return `body(*args, **kwargs)`, with the plan on the blocks of `module`.

        Raises:
            StrategyError: `module` is compiled, tensor parallel or in chunks, cannot be followed without
                data, has no plan, or so many of its calls wait for backward that the budget may be exceeded.
        """
        if not torch.is_grad_enabled():
            return self._run(module, body, args, kwargs)
        refuse_compiled("", module)
        made = self._made_for(module, args, kwargs)
        self._refuse_in_flight(made)
        if made.plan is not self.plan:
            carrying_out.enclose(made.plan, self.budget.modules_of(module))
            self.plan = made.plan
        results = self._run(module, body, args, kwargs)
        _refuse_left((args, kwargs), results)
        self._await_backward(results)
        return results

    def _run(
        self, module: nn.Module, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return body(*args, **kwargs) if self.inner is None else self.inner(module, body, args, kwargs)

    def _await_backward(self, results: Any) -> None:
        """Count a call as waiting until backward has run through all its results, or their graph is gone."""
        call = _Awaited()
        nodes = {each.grad_fn for each in tensors_held_by(results)}
        for node in nodes - {None}:
            assert node is not None
            node.register_hook(partial(_has_run, [call]))
        self._awaited.add(call)

    def _refuse_in_flight(self, made: _Made) -> None:
        """Refuse a call that may exceed the budget with those that wait for backward.

        Raises:
            StrategyError: with their number, and the bytes that they may need.
        """
        waiting = len(self._awaited)
        needed = made.plan.predicted_peak_bytes + waiting * made.call_bytes
        if waiting and needed > made.plan.budget_bytes:
            problem = (
                f"{waiting + 1} calls of the model would wait for backward and may need {needed} bytes; "
                f"the plan of the first call keeps {made.plan.budget_bytes} bytes for one"
            )
            remedy = f"run backward of a call before the next; or {_REMEDY}, for the step with all calls"
            raise StrategyError("ac", f"{problem}; {remedy}; or use ac=full")

    def _made_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Made:
        """Return the plan for the smallest known inputs that are at least as large as these.

        A new one is for known inputs, too, where these are as large: a budget may be a share of their peak.
        """
        call, device = _Call.of(module, args, kwargs), device_of(tree_flatten((args, kwargs))[0])
        for known in self._plans:
            if known.call.suits(call):
                return known
        inputs, known_bytes = without_memory((args, kwargs)), 0
        for known in self._plans:
            if known.inputs.args is not None and difference(known.call.sizes, call.sizes) is None:
                call = call._replace(sizes=known.call.sizes)
                inputs = known.inputs.args, known.inputs.kwargs
                known_bytes = max(known_bytes, known.plan.budget_bytes)
        _refuse_tensor_parallel(module)
        _refuse_chunked(module)
        blocks = self.budget.blocks_of(module).values()
        stays = python_state_kept(module, blocks, remedy=_REMEDY)
        with models_errors(_FOLLOWED, _REMEDY), _own_gradients_stay(module), stays:
            step = shadow_step(module, *inputs, device=device, accumulates=call.accumulates)
            with step.around():
                step.run()  # which makes what modules make once; a plan is for the calls after it
            plan = copy_context().run(self._plan, step, known_bytes, call)
        made = _Made(call, _Inputs(*inputs), plan, plan.predicted_peak_bytes - storage_bytes(step.standing))
        # one that the new one stands in for is never taken again, so that plans do not alternate
        self._plans = [each for each in self._plans if each.call != call._replace(accumulates=False)]
        self._plans.append(made)
        return made

    def _plan(self, step: RunnableStep, known_bytes: int, call: _Call) -> Plan:
        """Return the plan of `step`; where less trains, its share of a peak may be less than is known."""
        try:
            return self.budget.plan(step)
        except StrategyError as error:
            if error.where == "ac.fraction" and known_bytes:
                return self.budget.within(known_bytes).plan(step)
            if call.accumulates and error.where in _BUDGETS:
                problem = f"{error.problem}; gradients of earlier calls stand in this one"
                remedy = "call zero_grad() before the model where they are not summed up"
                raise StrategyError(error.where, f"{problem}: {remedy}") from error
            raise


def _refuse_left(given: Any, results: Any) -> None:
    """Refuse results without memory: a tensor of the step that was planned is kept outside of the model.

    Raises:
        StrategyError: some are.
    """
    if _has_fakes(results) and not _has_fakes(given):
        problem = f"{_FIRST}, and the model has kept one where nobody finds it"
        raise StrategyError("ac", f"{problem}; keep it as an attribute of a module, or {_REMEDY}")


def _has_fakes(values: Any) -> bool:
    return any(isinstance(each, FakeTensor) for each in tensors_held_by(values))


def _has_run(holder: list[_Awaited], *_gradients: Any) -> None:
    """Let a call go whose backward has begun; a hook of autograd's node."""
    holder.clear()


@contextmanager
def _own_gradients_stay(model: nn.Module) -> Iterator[None]:
    """Refuse a step without memory that reaches the parameters of `model` itself, and leave their gradients.

    A `forward` that was set on a block after the plan was applied may hold the block, not its copy.
    """
    gradients = {fqn: (each, each.grad) for fqn, each in model.named_parameters()}
    for parameter, _ in gradients.values():
        parameter.grad = None
    try:
        yield
        reached = next((fqn for fqn, (each, _) in gradients.items() if each.grad is not None), None)
    finally:
        for parameter, gradient in gradients.values():
            parameter.grad = gradient
    if reached is not None:
        problem = f"{_FIRST}, and a forward reaches {reached!r} itself"
        raise StrategyError("ac", f"{problem}, as one that is set on an instance does; {_REMEDY}")


def _refuse_tensor_parallel(model: nn.Module) -> None:
    """Refuse parameters that stay shards in use: without memory there are no ranks to share them."""
    gathered = set(_gathered_by_fsdp(model))
    for fqn, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in gathered:
            problem = "is a DTensor of tensor parallelism, and the first call plans for whole tensors"
            raise StrategyError("ac", f"{fqn!r} {problem}; {_REMEDY}")


def _refuse_chunked(model: nn.Module) -> None:
    """Refuse parts that run in chunks: a copy without memory has the forwards of the plain model."""
    for fqn, module in plain_named_modules(model):
        if isinstance(module, Chunked):
            where = repr(fqn) if fqn else "the model"
            problem = f"{where} runs in chunks, and the first call plans for the model without them"
            raise StrategyError("ac", f"{problem}; {_REMEDY}")


def _gathered_by_fsdp(model: nn.Module) -> Iterator[int]:
    """Yield the `id` of each parameter that FSDP2 alone has sharded."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for group in parameter_groups(unit):
                yield from (id(each.sharded_param) for each in group.fsdp_params if not each.is_dtensor)


def shadow_step(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device | None = None,
    accumulates: bool = False,
) -> RunnableStep:
    """Return a step of `module` on these inputs, without memory; its loss is the sum of the outputs.

    Args:
        device: where it computes; by default where the inputs are.
        accumulates: whether gradients of earlier steps stand.
    """
    device = device or device_of(tree_flatten((args, kwargs))[0])
    shadow = Shadow.of(module).on(device)
    given, named = shadowed(shadow, (args, kwargs), device)
    tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)]
    trained = [each for each in shadow.model.parameters() if each.requires_grad and accumulates]
    gradients = shadowed(shadow, trained, device)
    return RunnableStep(
        run=partial(_train_once, shadow.model, given, named, [*zip(trained, gradients, strict=True)]),
        model=shadow.model,
        device=device,
        standing=(*shadow.model.parameters(), *shadow.model.buffers(), *tensors, *gradients),
        around=partial(_followed, shadow),
    )


@contextmanager
def _followed(shadow: Shadow) -> Iterator[None]:
    assert shadow.mode is not None
    # anomaly mode looks for NaN among values, which are not there
    with (
        generators.restored(),
        torch.autograd.set_detect_anomaly(False),
        shadow.mode,
        as_with_data(),
        _RefusesCollectives(),
    ):
        yield


class _RefusesCollectives(OperatorMode):
    """Refuses what ranks do together: on tensors without memory there are no other ranks."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func` returns.

        Raises:
            StrategyError: it is a collective.
        """
        if getattr(func, "namespace", "") in _COLLECTIVES:
            problem = f"{_FIRST}, and the model runs the collective"
            raise StrategyError("ac", f"{problem} {func}; on each rank {_REMEDY}")
        return func(*args, **kwargs)


def _train_once(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    standing: Iterable[tuple[Tensor, Tensor]],
) -> None:
    model.zero_grad()
    for parameter, gradient in standing:
        parameter.grad = gradient
    results = [each for each in tensors_held_by(model(*args, **kwargs)) if each.requires_grad]
    torch.autograd.backward(results, [each.detach().new_ones(()).expand(each.shape) for each in results])
    # a scope of autocast around the model casts each weight once: the call that follows has casts of its own
    torch.clear_autocast_cache()
