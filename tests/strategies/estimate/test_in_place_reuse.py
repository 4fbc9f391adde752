"""Operators that write to the memory of an input: those for which nobody can tell the difference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.chunk.planning.chunk_plan import ChunkPlanner
from strategies.estimate.liveness import Storages
from strategies.tracing.operator_graph import record_scopes
from strategies.tracing.shadow import Shadow, shadowed
from tests.strategies.chunk.measuring import forward_peak_bytes

WIDTH = 8


class Code(nn.Module):
    """`body(linear(x), x)`."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.body(self.linear(x), x)


def overwriting(model: nn.Module, *, with_grad: bool = False) -> list[str]:
    shadow = Shadow.of(model).on(torch.device("cpu"))
    inputs = shadowed(shadow, ((torch.randn(3, WIDTH),), {}), torch.device("cpu"))
    with torch.set_grad_enabled(with_grad):
        (scope,) = record_scopes(shadow, frozenset(), *inputs)
    found = Storages.of_graph(scope.graph).overwrites
    return [str(each.target).removeprefix("aten.") for each in found.values()]


def of_two_halves(y: Tensor, _: Tensor) -> Tensor:
    first, second = y.chunk(2, dim=-1)
    return torch.sigmoid(first) * second


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(lambda y, _: functional.silu(y), ["silu_.default"], id="an input that nobody else uses"),
        pytest.param(
            lambda y, _: functional.gelu(y).mul(2), ["gelu_.default", "mul_.Tensor"], id="one after the other"
        ),
        pytest.param(lambda y, _: y.view(1, -1).exp(), ["exp_.default"], id="a view of it"),
        pytest.param(lambda y, x: y - x, ["sub_.Tensor"], id="with an input of the model beside it"),
        pytest.param(lambda y, x: y.masked_fill(x > 0, 0.0), ["masked_fill_.Scalar"], id="with a mask"),
        pytest.param(lambda y, x: functional.silu(x) * y, ["mul_.Tensor"], id="not an input of the model"),
        pytest.param(lambda y, x: x - y, [], id="not the second input"),
        pytest.param(lambda y, _: functional.silu(y) + y, ["add_.Tensor"], id="not what is used again"),
        pytest.param(lambda y, _: (functional.silu(y), y), [], id="not what is returned"),
        pytest.param(lambda y, _: (functional.silu(y), y.view(-1)), [], id="not what a view of is returned"),
        pytest.param(lambda y, _: y + y.t().sum(), [], id="not what a view of is used"),
        pytest.param(lambda y, x: y[:, :1] * x, [], id="not by what is broadcast"),
        pytest.param(lambda y, _: y.t() * 2.0, ["mul_.Tensor"], id="in another layout"),
        pytest.param(lambda y, _: y[1:].sigmoid(), [], id="not a part"),
        pytest.param(of_two_halves, ["mul_.Tensor"], id="not one half of it"),
        pytest.param(lambda y, _: y > 0, [], id="not by another dtype"),
        pytest.param(lambda y, _: y.softmax(-1), [], id="not by a reduction"),
        pytest.param(
            lambda y, _: functional.dropout(y, 0.5), ["div_.Scalar", "mul_.Tensor"], id="not by what draws"
        ),
    ],
)
def test_what_is_overwritten(body: Callable[[Tensor, Tensor], Tensor], expected: list[str]) -> None:
    assert sorted(overwriting(Code(body).train())) == sorted(expected)


def test_nothing_is_overwritten_where_gradients_are_recorded() -> None:
    assert overwriting(Code(lambda y, _: functional.silu(y)), with_grad=True) == []


def test_a_plan_holds_one_copy_less_and_gives_the_same() -> None:
    model, x = Code(lambda y, _: functional.silu(y)).eval(), torch.randn(3, WIDTH)
    unchunked, one = forward_peak_bytes(model, (x,)), 3 * WIDTH * 4
    expected = model(x)
    plan = ChunkPlanner.of(model, (x,)).plan(unchunked - 1)
    planned = plan.apply(model)
    with torch.no_grad():
        assert torch.equal(planned(x), expected)
    assert (unchunked, plan.predicted_peak_bytes, plan.regions) == (2 * one, one, ())
    assert forward_peak_bytes(planned, (x,)) == one
    planned(x).sum().backward()  # with gradients it is left to autograd
    assert model.linear.weight.grad is not None
