"""Whatever changes between two calls of a chunked model: it does as the plain model does, or says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrize

from strategies.base import PlannedStep, StrategyError
from strategies.chunk import ChunkPlan

B, S, D, WIDE = 2, 12, 8, 32


class _Layer(nn.Module):
    """A block that asks for all that a forward may ask for."""

    slope = 1.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, WIDE)
        self.down = nn.Linear(WIDE, D)
        self.gain = nn.Parameter(torch.ones(D))
        self.other_gain = self.gain
        self.table = np.ones(3)
        self.numbers = [1.0, 1.0]
        self.options = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
        self.gives = "tensor"

    def gate(self, h: Tensor) -> Tensor:
        return functional.gelu(h)

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        h = self.down(self.gate(self.up(x)))
        h = h * float(self.table[0]) * self.numbers[1] * self.slope * self.options.inner.scale
        h = x + h * self.other_gain if x is residual else x + h * self.other_gain + 0.5 * residual
        if hasattr(self, "shift"):
            h = h + 1.0
        if self.gives == "tensor":
            return h
        if self.gives == "dtype":
            return h.double()
        return (h, h.tanh()) if self.gives == "pair" else (h, h.tanh(), h.sin())


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            given = layer(h, y)
            h = torch.stack(given).sum(0) if isinstance(given, tuple) else given
            h = h * 3.0 if h.dtype is torch.float64 and x.dtype is torch.float32 else h
            h = h.to(x.dtype)
        outputs: Tensor = self.head(h) + (x - y)
        return outputs


def _layer(model: nn.Module) -> Any:
    return model.get_submodule("layers.1")


def _add_hook(model: nn.Module) -> None:
    _layer(model).up.register_forward_hook(lambda _module, _args, output: output * 2)


def _add_pre_hook(model: nn.Module) -> None:
    _layer(model).up.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))


def _hook_the_block(model: nn.Module) -> None:
    _layer(model).register_forward_hook(lambda _module, _args, output: output * 2)


def _hook_gives_a_pair(model: nn.Module) -> None:
    _layer(model).register_forward_hook(lambda _module, _args, output: (output, output * 2))


def _patch_forward(model: nn.Module) -> None:
    up = _layer(model).up
    plain = up.forward
    up.forward = lambda x: plain(x) * 2


def _patch_method(model: nn.Module) -> None:
    _layer(model).gate = functional.silu


def _patch_block(model: nn.Module) -> None:
    layer = _layer(model)
    plain = layer.forward
    layer.forward = lambda *args: plain(*args) * 2


def _weight_norm(model: nn.Module) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(_layer(model).up)
    with torch.no_grad():
        _layer(model).up.weight_g.mul_(2.0)


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _parametrise(model: nn.Module) -> None:
    parametrize.register_parametrization(_layer(model).up, "weight", _Doubled())


def _new_gain(model: nn.Module) -> None:
    _layer(model).other_gain = nn.Parameter(2 * torch.ones(D))


class _LowRank(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, 2, dtype=linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x) + self.down(x).sum(-1, keepdim=True)
        return outputs


def _low_rank(model: nn.Module) -> None:
    torch.manual_seed(1)
    _layer(model).up = _LowRank(_layer(model).up)


def _new_class(model: nn.Module) -> None:
    class _Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    _layer(model).up.__class__ = _Twice


def _new_class_of_the_block(model: nn.Module) -> None:
    layer = _layer(model)
    layer.__class__ = type("Steep", (type(layer),), {"slope": 2.0})


def _untie(model: nn.Module) -> None:
    layers: Any = model.get_submodule("layers")
    layers[0] = copy.deepcopy(layers[1])


def _set(name: str, value: Any) -> Callable[[nn.Module], None]:
    return lambda model: setattr(_layer(model), name, value)


def _do(act: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        act(_layer(model))

    return change


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda _: None,
    "a hook": _add_hook,
    "a hook before": _add_pre_hook,
    "a hook of the block": _hook_the_block,
    "a hook of the block that gives a pair": _hook_gives_a_pair,
    "another forward of a module": _patch_forward,
    "another forward of the block": _patch_block,
    "another method": _patch_method,
    "weight norm by hooks": _weight_norm,
    "a parametrisation": _parametrise,
    "a parameter under two names": _new_gain,
    "low rank": _low_rank,
    "another class": _new_class,
    "another class of the block": _new_class_of_the_block,
    "other layers": _untie,
    "an array in place": _do(lambda layer: layer.table.__setitem__(0, 2.0)),
    "a list in place": _do(lambda layer: layer.numbers.__setitem__(1, 2.0)),
    "a number of the class": _do(lambda layer: setattr(type(layer), "slope", 2.0)),
    "a number of an object of an object": _do(lambda layer: setattr(layer.options.inner, "scale", 2.0)),
    "an attribute that is new": _set("shift", None),
    "two results": _set("gives", "pair"),
    "three results": _set("gives", "three"),
    "results of another dtype": _set("gives", "dtype"),
    "evaluation": _do(lambda layer: layer.eval()),
    "frozen": _do(lambda layer: layer.requires_grad_(False)),
}
REFUSED = {
    "a hook": "'layers.1.up' has hooks",
    "a hook before": "'layers.1.up' has hooks",
    "weight norm by hooks": "'layers.1.up' has hooks",
    "a hook of the block that gives a pair": "'layers.1' returns a tuple",
    "another class of the block": "'layers.1' has another class than when its plan was applied",
    "another forward of a module": "'layers.1.up' has a forward that is a function",
}


@contextmanager
def _slope() -> Iterator[None]:
    yield
    _Layer.slope = 1.0


def _results(model: nn.Module, inputs: tuple[Tensor, ...], *, training: bool) -> list[Tensor]:
    with torch.set_grad_enabled(training):
        outputs = model(*inputs)
    if not training:
        return [outputs]
    model.zero_grad()
    outputs.square().mean().backward()
    return [outputs.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@cache
def _plan(*, training: bool) -> ChunkPlan:
    step = PlannedStep(loss=lambda outputs: outputs.square().mean()) if training else None
    inputs = torch.zeros(B, S, D), torch.zeros(B, S, D)
    plan = ChunkPlan.make(_Model(), inputs, training=training, step=step)
    assert plan.regions
    return plan


def _models(*, training: bool) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    plain = _Model()
    x, y = torch.randn(2, B, S, D)
    return plain, _plan(training=training).apply(copy.deepcopy(plain)), x, y


def _same(planned: nn.Module, plain: nn.Module, inputs: tuple[Tensor, ...], *, training: bool) -> None:
    expected = _results(plain, inputs, training=training)
    actual = _results(planned, inputs, training=training)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_followed_or_refused(change: str, *, training: bool) -> None:
    plain, planned, x, y = _models(training=training)
    _same(planned, plain, (x, y), training=training)
    with _slope():
        for model in (plain, planned):
            CHANGES[change](model)
        if change not in REFUSED:
            _same(planned, plain, (x, y), training=training)
            return
        with pytest.raises(StrategyError) as refused:
            _results(planned, (x, y), training=training)
    assert REFUSED[change] in str(refused.value)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("one_first", [True, False], ids=["one tensor first", "two tensors first"])
def test_inputs_may_be_one_tensor(*, one_first: bool, training: bool) -> None:
    plain, planned, x, y = _models(training=training)
    for inputs in ((x, x), (x, y))[:: 1 if one_first else -1]:
        _same(planned, plain, inputs, training=training)


def test_a_patched_block_is_planned_first() -> None:
    model: Any = _Model()
    model.layers[1].forward = model.layers[1].forward
    with pytest.raises(StrategyError) as refused:
        _plan(training=False).apply(model)
    problem = "'layers.1' has a forward set on the instance, which no plan replaces"
    assert str(refused.value) == f"chunk: {problem}; set it after the plan is applied"


def test_a_patched_block_is_recorded_as_its_class_has_it() -> None:
    plain, planned, x, y = _models(training=False)
    for model in (plain, planned):
        _patch_block(model)
    for inputs in ((x, y), (x[:1], y[:1]), (x, x)):
        _same(planned, plain, inputs, training=False)


def test_parameters_that_are_gone_in_backward_are_refused() -> None:
    plan, (_, _, x, y) = _plan(training=True), _models(training=True)
    again = {fqn: replace(each, recomputes=bool(fqn)) for fqn, each in plan.schedulers.items()}
    model = replace(plan, schedulers=again).apply(_Model())
    parameters = {name: 2 * each for name, each in model.named_parameters()}
    loss = functional_call(model, parameters, (x, y)).square().mean()
    with pytest.raises(StrategyError) as refused:
        loss.backward()
    problem = "'layers.1' ran with other parameters in forward than it has now; run backward inside of what"
    assert str(refused.value) == f"chunk: {problem} gives it these (torch.func.functional_call)"
