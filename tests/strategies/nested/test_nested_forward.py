"""Each forward is followed as it is: models and inputs may change between steps."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies import StrategyError
from strategies.ac.nested import Nested
from tests.strategies.nested.examination import Calls, Case, Given, different, rows, step

WIDTH = 4
BOTH: dict[str, Any] = {"a": [0, 0], "b": 0}


@dataclass
class Configuration:
    scale: float = 2.0
    nested: dict[str, Any] = field(default_factory=lambda: {"shift": 1.0})


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


def add_linear(model: Any) -> None:
    torch.manual_seed(5)
    model.more.append(nn.Linear(WIDTH, WIDTH))


def widen(model: Any) -> None:
    torch.manual_seed(5)
    model.b = nn.Linear(WIDTH, 2 * WIDTH)


CHANGED = {
    "a number": Case(
        forward=lambda self, x: self.b(self.a(x)) * self.scale,
        more=lambda: {"scale": 2.0},
        changes=lambda model: setattr(model, "scale", model.scale + 1),
    ),
    "a number in a configuration": Case(
        forward=lambda self, x: self.b(self.a(x)) * self.configuration.scale,
        more=lambda: {"configuration": Configuration()},
        changes=lambda model: setattr(model.configuration, "scale", 3.0),
    ),
    "a number deeper in a configuration": Case(
        forward=lambda self, x: self.b(self.a(x)) * self.configuration.nested["shift"],
        more=lambda: {"configuration": Configuration()},
        changes=lambda model: model.configuration.nested.update(shift=3.0),
    ),
    "a number in an object with slots": Case(
        forward=lambda self, x: self.b(self.a(x)) * self.configuration.scale,
        more=lambda: {"configuration": Slotted()},
        changes=lambda model: setattr(model.configuration, "scale", 3.0),
    ),
    "a list": Case(
        forward=lambda self, x: self.b(self.a(x)) * sum(self.scales),
        more=lambda: {"scales": [1.0]},
        changes=lambda model: model.scales.append(2.0),
    ),
    "a function": Case(
        forward=lambda self, x: self.b(self.act(self.a(x))),
        more=lambda: {"act": torch.sin},
        changes=lambda model: setattr(model, "act", torch.cos),
    ),
    "the probability of a submodule's dropout": Case(
        forward=lambda self, x: self.b(functional.dropout(self.a(x), self.drop.p, self.drop.training)),
        more=lambda: {"drop": nn.Dropout(0.2)},
        changes=lambda model: setattr(model.drop, "p", 0.7),
    ),
    "the mode of the model": Case(
        forward=lambda self, x: functional.dropout(self.b(self.a(x)), 0.5, self.training),
        changes=lambda model: model.train(not model.training),
    ),
    "the mode of a submodule": Case(
        forward=lambda self, x: functional.dropout(self.b(self.a(x)), 0.5, self.b.training),
        changes=lambda model: model.b.train(not model.b.training),
    ),
    "the mode of a submodule that is called": Case(
        forward=lambda self, x: self.b(self.drop(self.a(x))),
        more=lambda: {"drop": nn.Dropout(0.2)},
        labels={"a": 0, "drop": 0, "b": 1},
        changes=lambda model: model.drop.train(not model.drop.training),
    ),
    "a submodule more": Case(
        forward=lambda self, x: self.b(self.more(self.a(x))),
        more=lambda: {"more": nn.Sequential(nn.Linear(WIDTH, WIDTH))},
        labels={"a": 0, "more.0": 1},
        changes=add_linear,
    ),
    "a submodule exchanged for one of another width": Case(
        forward=lambda self, x: (y := self.b(self.a(x))) * torch.ones(y.size(-1)), changes=widen
    ),
    "the shape of a buffer": Case(
        forward=lambda self, x: self.b(self.a(x)) * self.held.numel() + self.held.sum(),
        more=lambda: {"held": torch.ones(3)},
        changes=lambda model: setattr(model, "held", torch.ones(5)),
    ),
    "values of a parameter": Case(
        forward=lambda self, x: self.b(self.a(x)) + self.b.bias,
        changes=lambda model: model.b.bias.data.add_(1.0),
    ),
    "parameters that are frozen": Case(
        forward=lambda self, x: self.b(self.a(x)), changes=lambda model: model.a.requires_grad_(False)
    ),
    "a dtype": Case(
        forward=lambda self, x: (
            self.b(self.a(x.to(self.b.weight.dtype))) * torch.ones(WIDTH, dtype=self.b.weight.dtype)
        ),
        changes=lambda model: model.to(torch.bfloat16),
    ),
}


@pytest.mark.parametrize("case", CHANGED.values(), ids=CHANGED)
def test_what_forward_read_may_change_between_steps(case: Case) -> None:
    assert case.differences(steps=3) == []


def model_and_plain(forward: Callable[..., Any], **more: Any) -> tuple[Given, Given]:
    torch.manual_seed(0)
    plain = Given(forward, **more)
    model = copy.deepcopy(plain)
    Nested(labels=BOTH, early_stop=False).apply(model)
    return model, plain


def glue(self: Any, x: Tensor, n: int = 1) -> Any:
    y = functional.dropout(self.a(x), 0.2) * x.shape[0]
    return self.b(y) * n


KINDS: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "other batch sizes": [lambda: (torch.ones(2, WIDTH),), lambda: (torch.ones(5, WIDTH),)],
    "another number of dimensions": [lambda: (torch.ones(2, WIDTH),), lambda: (torch.ones(2, 3, WIDTH),)],
    "other strides": [lambda: (torch.ones(WIDTH, WIDTH),), lambda: (torch.ones(WIDTH, WIDTH).T,)],
    "a gradient, and none": [lambda: (rows(),), lambda: (rows().detach(),)],
    "another number": [lambda: (rows(), 2), lambda: (rows(), 3), lambda: (rows(), 2.0)],
    "a number left out": [lambda: (rows(),), lambda: (rows(), 4)],
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_inputs_of_other_kinds(kinds: list[Callable[[], tuple[Any, ...]]]) -> None:
    model, plain = model_and_plain(glue)
    for _ in range(2):
        for make in kinds:
            torch.manual_seed(1)
            expected = step(plain, *make())
            torch.manual_seed(1)
            assert different(expected, step(model, *make())) == []


def test_autocast_on_and_off() -> None:
    model, plain = model_and_plain(lambda self, x: self.b(self.a(x) * torch.ones(1)).float())
    x = torch.randn(3, WIDTH)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert different(step(plain, x), step(model, x)) == []


def test_no_gradients_no_regions() -> None:
    model, plain = model_and_plain(
        lambda self, x: self.b(self.a(x)) * float(x.sum())
    )  # could not be recorded
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))


def test_evaluation_with_gradients() -> None:
    model, plain = model_and_plain(lambda self, x: functional.dropout(self.b(self.a(x)), 0.5, self.training))
    x = torch.randn(3, WIDTH)
    assert different(step(plain.eval(), x), step(model.eval(), x)) == []


def test_a_model_whose_parameters_are_all_frozen() -> None:
    model, plain = model_and_plain(lambda self, x: self.b(self.a(x)))
    x = torch.randn(3, WIDTH)
    assert torch.equal(model.requires_grad_(False)(x), plain(x))


def test_gradients_accumulate_over_two_forwards() -> None:
    model, plain = model_and_plain(glue)
    for each in (plain, model):
        torch.manual_seed(3)
        first, second = each(torch.ones(2, WIDTH)), each(torch.full((2, WIDTH), 0.5))
        (first.sum() + second.sin().sum()).backward()
        each(torch.ones(5, WIDTH)).sum().backward()
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None, name
        assert actual.grad is not None, name
        assert torch.equal(expected.grad, actual.grad), name


def module_level(self: Any, x: Tensor) -> Any:
    return self.b(functional.dropout(self.a(x), 0.5))


@pytest.mark.parametrize("is_used", [False, True], ids=["before the first call", "behind it"])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_have_regions_of_their_own(duplicate: Callable[[Any], Any], is_used: bool) -> None:
    model, plain = model_and_plain(module_level)
    x = torch.randn(3, WIDTH)
    if is_used:
        step(model, x)
    twin = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    counted = Calls(twin, nn.Linear)
    assert different(step(plain, x), step(twin, x)) == []
    assert dict(counted.counts) == {"a": 3, "b": 2}


def test_names_and_modules_are_those_of_the_plain_model() -> None:
    model, plain = model_and_plain(glue, held=torch.ones(2), layers=nn.ModuleList([nn.Linear(2, 2)]))
    step(model, rows())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in model.modules()][1:] == [type(module) for module in plain.modules()][
        1:
    ]


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Given(glue)
        Nested(labels=BOTH).apply(model, (torch.empty(3, WIDTH),))
        assert model(torch.empty(3, WIDTH)).shape == (3, WIDTH)
    model.to_empty(device="cpu")
    torch.nn.init.ones_(model.a.weight)
    step(model, rows())


def test_a_module_called_more_often_than_at_first_stays_in_its_region() -> None:
    torch.manual_seed(0)
    plain = Given(lambda self, x, n: self.b(x := [x := self.a(x) for _ in range(n)][-1]))
    model = Nested(labels={"a": 0, "b": 1}, early_stop=False).apply(copy.deepcopy(plain))
    counted = Calls(model, nn.Linear)
    for n in (2, 4, 1):
        counted.counts.clear()
        x = torch.randn(3, WIDTH)
        assert different(step(plain, x, n), step(model, x, n)) == []
        assert dict(counted.counts) == {"a": 2 * n, "b": 2}


def test_calls_that_part_a_region_in_a_later_step_are_refused() -> None:
    model = Given(
        lambda self, x, between=None: self.b(self.a(x) if between is None else self.c(self.a(x))),
        c=nn.Linear(WIDTH, WIDTH),
    )
    Nested(labels={"a": 0, "b": 0}).apply(model)
    step(model, rows())
    with pytest.raises(StrategyError) as error:
        step(model, rows(), between=1)
    assert str(error.value) == (
        "ac.labels: region 0 ends at 'a' and begins again at 'b'; 'c' stands between: "
        "put what is between into the region, or give the second part another index"
    )


def stack() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + functional.dropout(layer(x), 0.2) * 0.5
            return x

    torch.manual_seed(0)
    return Net()


def two_in_flight(model: nn.Module, x: Tensor) -> None:
    losses = [model(x).square().mean(), model(x[:1]).square().mean()]
    with torch.no_grad():
        model(x)
    for loss in losses:
        loss.backward()


def two_in_flight_reversed(model: nn.Module, x: Tensor) -> None:
    first, second = model(x).square().mean(), model(x[:1]).square().mean()
    second.backward()
    first.backward()


def kept_graph(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def gradients_of_parts(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean()
    torch.autograd.grad(loss, list(model.get_submodule("layers.2").parameters()), retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    "backward", [two_in_flight, two_in_flight_reversed, kept_graph, double_backward, gradients_of_parts]
)
@pytest.mark.parametrize("levels", [[4], [2, 2], [1, 2, 2]], ids=["one level", "two", "three"])
def test_every_order_of_backwards(backward: Callable[[nn.Module, Tensor], None], levels: list[int]) -> None:
    found = []
    for model in (stack(), Nested(layers_fqn="layers", levels=levels).apply(stack())):
        torch.manual_seed(1)
        backward(model, torch.randn(3, WIDTH))
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*found, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)


def test_no_tensor_outlives_its_step_without_the_collector() -> None:
    model = Nested(layers_fqn="layers", levels=[2, 2]).apply(stack())
    x = torch.randn(3, WIDTH)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        alive = []
        for _ in range(3):
            model(x).sum().backward()
            model(x)  # without a backward
            alive.append(sum(type(each) is Tensor for each in gc.get_objects()))
        assert len(set(alive)) == 1
    finally:
        gc.enable()


def test_a_parameter_changed_between_forward_and_backward_is_an_error() -> None:
    model = Nested(layers_fqn="layers", levels=[2]).apply(stack())
    loss = model(torch.randn(3, WIDTH)).sum()
    with torch.no_grad():
        model.get_parameter("layers.2.0.weight").mul_(2)
    with pytest.raises(
        RuntimeError, match=r"'layers.2.0.weight', \[float32 \[4, 4\]\] is at version 2; expected version 1"
    ):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_random_numbers_of_a_gpu_are_drawn_again() -> None:
    found = []
    for model in (stack(), Nested(layers_fqn="layers", levels=[2, 2]).apply(stack())):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.cuda()(torch.randn(3, WIDTH, device="cuda")).float().sum()
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*found, strict=True):
        assert expected is not None
        assert actual is not None
        assert torch.equal(expected, actual)
