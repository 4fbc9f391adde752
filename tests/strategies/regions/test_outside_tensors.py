"""Tensors from outside: what was written to since forward is refused where backward needs it, else not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies import Strategy, StrategyError
from strategies.ac.full import Full
from strategies.ac.nested import Nested
from strategies.ac.selective_layer import SelectiveLayer
from strategies.ac.selective_op import SelectiveOp
from strategies.regions.outside_tensors import OutsideTensors
from tests.strategies.toys import WIDTH, Layers

MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation: "
TABLE = torch.zeros(WIDTH)
FULL = Full(layers_fqn="layers")
VARIANTS: Mapping[str, Strategy] = {
    "full": FULL,
    "full, to the end": Full(layers_fqn="layers", early_stop=False),
    "full, reentrant": Full(layers_fqn="layers", use_reentrant=True),
    "full, offloading": Full(layers_fqn="layers", offload=True),
    "full, as torch splits": Full(layers_fqn="layers", split_backward="torch"),
    "selective_layer": SelectiveLayer(layers_fqn="layers", ac_freq=1),
    "selective_op": SelectiveOp(layers_fqn="layers", save_ops=("aten.bmm.default",)),
    "nested": Nested(layers_fqn="layers", rewind=False),
    "nested in two": Nested(layers_fqn="layers", levels=[1, 2], rewind=False),
}
each_variant = pytest.mark.parametrize("strategy", VARIANTS.values(), ids=VARIANTS)
REWINDING = {"full": Full(layers_fqn="layers", rewind=True), "nested": Nested(layers_fqn="layers")}


class Reading(nn.Module):
    """A linear, and a sum with what `read` finds, of which no gradient needs the value itself."""

    table: Tensor

    def __init__(self, read: Callable[[Reading], Tensor]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.embedding = nn.BatchNorm1d(WIDTH), nn.Embedding(2, WIDTH)
        self.register_buffer("table", torch.zeros(WIDTH))
        self.attribute = torch.zeros(WIDTH)
        self.listed: list[Any] = [torch.zeros(WIDTH)]
        self.read = read

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        """Return x + gelu(linear(x) + read)."""
        read = given[0][0] if given else self.read(self)
        return x + functional.gelu(self.linear(x) + read)


class Taking(Layers):
    """Layers that get a tuple of tensors, too."""

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        """Return what the last of them returns."""
        for layer in self.layers:
            x = layer(x, *given)
        return x


def model_of(read: Callable[[Reading], Tensor]) -> Taking:
    torch.manual_seed(0)
    return Taking(*(Reading(read) for _ in range(2)))


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()


def gradients(model: nn.Module, write: Callable[[nn.Module], object], *given: Any) -> list[Tensor | None]:
    """Return the gradients of a step, between whose forward and backward something is written to."""
    x = inputs()
    loss = model(x, *given).square().sum()
    with torch.no_grad():
        write(model)
    loss.backward()
    return [each.grad for each in (x, *model.parameters())]


def block(model: nn.Module, number: int = 0) -> Any:
    """Return a block of the model."""
    return model.get_submodule(f"layers.{number}")


def _written_in(name: str) -> Callable[[nn.Module], object]:
    def write(model: nn.Module) -> None:
        held = block(model, 1)
        for part in name.split("."):
            held = held[int(part)] if part.isdecimal() else getattr(held, part)
        held.add_(1.0)

    return write


READ: Mapping[str, tuple[Callable[[Reading], Tensor], Callable[[nn.Module], object], str]] = {
    "a bias": (lambda each: each.table, _written_in("linear.bias"), "'layers.1.linear.bias', "),
    "a bias, through a view": (
        lambda each: each.table,
        lambda model: model.get_parameter("layers.1.linear.bias").view(-1)[0].add_(1.0),
        "'layers.1.linear.bias', ",
    ),
    "a weight": (lambda each: each.table, _written_in("linear.weight"), "'layers.1.linear.weight', "),
    "the table of an embedding": (
        lambda each: each.embedding(torch.ones((), dtype=torch.int64)),
        _written_in("embedding.weight"),
        "'layers.1.embedding.weight', ",
    ),
    "a buffer": (lambda each: each.table, _written_in("table"), "'layers.1.table', "),
    "an attribute": (lambda each: each.attribute, _written_in("attribute"), "'layers.1.attribute', "),
    "a list": (lambda each: each.listed[0], _written_in("listed.0"), "'layers.1.listed', "),
    "a global": (lambda _: TABLE, lambda _: TABLE.add_(1.0), ""),
    "statistics in evaluation": (
        lambda each: each.norm.eval()(torch.ones(1, WIDTH))[0],
        lambda model: model.get_buffer("layers.1.norm.running_mean").add_(1.0),
        "'layers.1.norm.running_mean', ",
    ),
}
"""What forward reads, what is written to, and how a message names it."""


def message(name: str) -> str:
    said = re.escape(MODIFIED + name)
    return f"^{said}\\[float32 \\[.*\\]\\] is at version .*; expected version .* instead; "


@each_variant
@pytest.mark.parametrize("read", READ)
def test_what_backward_needs_is_refused_by_its_name(strategy: Strategy, read: str) -> None:
    reads, write, name = READ[read]
    model = strategy.apply(model_of(reads))
    with pytest.raises(RuntimeError, match=message(name)):
        gradients(model, write)


@each_variant
def test_a_closed_over_tensor_and_one_in_a_tuple_are_compared(strategy: Strategy) -> None:
    closed, given = torch.zeros(WIDTH), (torch.zeros(WIDTH),)
    with pytest.raises(RuntimeError, match=message("")):
        gradients(strategy.apply(model_of(lambda _: closed)), lambda _: closed.add_(1.0))
    with pytest.raises(
        (RuntimeError, StrategyError), match=r"by an inplace operation|later changed in place"
    ):
        gradients(strategy.apply(model_of(lambda _: closed)), lambda _: given[0].add_(1.0), given)


@each_variant
def test_a_buffer_of_the_model_is_compared_that_blocks_refer_to(strategy: Strategy) -> None:
    model = model_of(lambda each: each.listed[1].get_buffer("shared"))
    model.register_buffer("shared", torch.zeros(WIDTH))
    for number in range(2):
        block(model, number).listed.append(model)
    with pytest.raises(RuntimeError, match=message("")):
        gradients(strategy.apply(model), lambda whole: whole.get_buffer("shared").add_(1.0))


def _counted(each: Reading) -> Tensor:
    each.table += 1  # its own state
    return each.attribute


def _normalised(each: Reading) -> Tensor:
    normalised: Tensor = each.norm(inputs().detach())
    return normalised.detach()[0]


def _as_it_is(model: nn.Module) -> None:
    """Write to nothing."""


with torch.inference_mode():
    MADE = torch.ones(WIDTH)
UNREAD: Mapping[str, tuple[Callable[[Reading], Tensor], Callable[[nn.Module], object]]] = {
    "nothing": (lambda each: each.table, _as_it_is),
    "parameters that are not read": (lambda each: each.table, _written_in("other.weight")),
    "a buffer that is not read": (lambda each: each.attribute, _written_in("table")),
    "what forward writes to": (_counted, _written_in("table")),
    "statistics in training": (_normalised, lambda model: model(inputs())),
    "a constant of inference mode": (lambda each: each.attribute + MADE.clone(), _as_it_is),
}


@each_variant
@pytest.mark.parametrize("read", UNREAD)
def test_what_no_gradient_needs_may_change(strategy: Strategy, read: str) -> None:
    reads, write = UNREAD[read]
    expected = gradients(model_of(reads), write)
    found = gradients(strategy.apply(model_of(reads)), write)
    assert all(map(_are_equal, found, expected))


class Heads(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what both make of the trunk."""
        trunk = functional.gelu(self.trunk(x))
        return functional.gelu(self.one(trunk)).sin(), functional.gelu(self.two(trunk)).sin()


@pytest.mark.parametrize(
    "strategy", [FULL, VARIANTS["full, as torch splits"], VARIANTS["selective_op"], VARIANTS["nested"]]
)
def test_a_head_may_be_trained_before_the_backward_of_another(strategy: Strategy) -> None:
    torch.manual_seed(0)
    heads = Layers(Heads())
    found = []
    for model in (heads, strategy.apply(copy.deepcopy(heads))):
        one, two = model(inputs())
        one.sum().backward(retain_graph=True)
        torch.optim.SGD(model.get_submodule("layers.0.one").parameters(), lr=0.5).step()
        two.sum().backward()
        found.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


def _steps(model: nn.Module) -> None:
    """Let each parameter step as soon as its gradient is there."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(0.01 * parameter.grad)
        parameter.grad = None

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)


def plain() -> Layers:
    """Return a model of two blocks."""
    return model_of(lambda each: each.table)


def sharing() -> Layers:
    """Return one whose last block is its first."""
    model = plain()
    return Layers(block(model), block(model, 1), block(model))


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, plain) for name in VARIANTS]
    + [(name, sharing) for name in VARIANTS if name != "full, reentrant"],  # which steps before the other use
)
def test_optimizers_may_step_within_backward(name: str, make: Callable[[], nn.Module]) -> None:
    found = []
    for change in (_same, VARIANTS[name].apply):
        model = change(make())
        _steps(model)
        for _ in range(2):
            model(inputs()).square().sum().backward()
        found.append([each.tolist() for each in model.parameters()])
    assert found[0] == found[1]


def test_a_step_within_a_reentrant_backward_is_refused_before_another_use() -> None:
    model = VARIANTS["full, reentrant"].apply(sharing())
    _steps(model)
    with pytest.raises(RuntimeError, match=message("'layers.0.linear.bias', ")):
        model(inputs()).square().sum().backward()


@pytest.mark.parametrize("strategy", REWINDING.values(), ids=REWINDING)
def test_rewinding_finds_a_buffer_as_forward_did(strategy: Strategy) -> None:
    write = _written_in("table")
    found = [gradients(change(plain()), write) for change in (_same, strategy.apply)]
    assert all(map(_are_equal, *found))


@pytest.mark.parametrize("strategy", REWINDING.values(), ids=REWINDING)
def test_rewinding_refuses_a_buffer_that_backward_itself_reads(strategy: Strategy) -> None:
    model = strategy.apply(model_of(lambda each: each.linear.weight[0] * each.table))
    with pytest.raises(RuntimeError, match=message("'layers.1.table', ")):
        gradients(model, _written_in("table"))


def _same(model: nn.Module) -> nn.Module:
    return model


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_a_table_that_the_first_forward_makes_is_compared() -> None:
    def made(each: Reading) -> Tensor:
        if not hasattr(each, "late"):
            each.late = torch.zeros(WIDTH)
        return torch.as_tensor(each.late)

    with pytest.raises(RuntimeError, match=message("'layers.1.late', ")):
        gradients(FULL.apply(model_of(made)), _written_in("late"))


def test_a_tensor_that_was_replaced_is_not_held() -> None:
    reading = block(plain())
    found = OutsideTensors().found_by(reading, ())
    found.end()
    before = reading.table
    reading.table = torch.ones(WIDTH)
    before.add_(1.0)
    assert [each.tensor is before for each in found.past()] == [True]
    del before
    assert found.past() == []


def parts_of(error: BaseException) -> Iterator[str]:
    yield from str(error).removeprefix(MODIFIED).split("; ")


def test_a_message_says_what_to_do_and_names_a_block_by_its_class_where_it_has_no_name() -> None:
    model = model_of(lambda each: each.table)
    call = FULL.call_site(block(model))
    loss = call(inputs()).square().sum()
    with torch.no_grad():
        block(model).linear.bias.add_(1.0)
    with pytest.raises(RuntimeError) as refused:
        loss.backward()
    assert [*parts_of(refused.value)] == [
        "'linear.bias' of a Reading, [float32 [16]] is at version 2",
        "expected version 1 instead",
        "a Reading reads it again in backward: write to it after backward",
    ]
