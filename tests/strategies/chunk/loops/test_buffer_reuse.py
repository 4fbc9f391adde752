"""Results in the memory of what dies: never in that of inputs, parameters, or what autograd has kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.chunk import ChunkPlan
from strategies.chunk.running.chunked_forward import chunked_forwards
from tests.strategies.chunk.measuring import forward_peak_bytes

WIDTH = 8


class Block(nn.Module):
    """An MLP with a softmax, in a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.down(functional.gelu(self.up(x)).softmax(-1))
        return outputs


class Table(nn.Module):
    """A block that gives its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity()])
        self.weight = nn.Parameter(torch.randn(15, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Model(nn.Module):
    """`of(model, x)` where `up` and `down` make and take what is large."""

    def __init__(self, of: Callable[[Model, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(10, 12))
        self.layers = nn.ModuleList([Block(), Block()])
        self.tables = nn.ModuleList([Table()])
        self.of = of

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.of(self, x)

    def grown(self, h: Tensor) -> Tensor:
        return torch.sin(self.down(functional.gelu(self.up(h))))


def _detached_first(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    h = torch.exp(model.inner(x))
    with torch.no_grad():
        t = model.layers[0](h)
    return (model.grown(model.layers[1](t)),)


def _detached_last(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    h = torch.exp(model.inner(x))
    grown = model.grown(h)
    with torch.no_grad():
        t = model.layers[0](h)
    return grown, t


def _frozen_last(model: Model, x: Tensor) -> tuple[Tensor, ...]:
    h = torch.exp(model.inner(x))
    return model.layers[0](h), model.grown(h)


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda model, x: model.grown(x.view(-1, WIDTH)), id="a view of an input"),
        pytest.param(lambda model, x: model.grown(x.view(-1, WIDTH)[:]), id="a view of a view of an input"),
        pytest.param(lambda model, _: model.grown(model.weight.view(-1, WIDTH)), id="a view of a parameter"),
        pytest.param(lambda model, _: model.grown(model.tables[0]()), id="a parameter of a block"),
    ],
)
def test_inputs_and_parameters_stay_as_they_are(of: Callable[[Model, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Model(of).eval(), torch.randn(10, 12)
    planned = ChunkPlan.make(model, (x,)).apply(copy.deepcopy(model))
    before, state = x.clone(), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            torch.testing.assert_close(planned(x), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)
    assert all(torch.equal(value, state[name]) for name, value in planned.state_dict().items())


@pytest.mark.parametrize("of", [_detached_first, _detached_last, _frozen_last])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_plain_model(
    of: Callable[[Model, Tensor], tuple[Tensor, ...]], *, training: bool
) -> None:
    torch.manual_seed(0)
    model, x = Model(of).train(training), torch.randn(64, WIDTH)
    for module in (model.inner, model.up, model.down):
        module.requires_grad_(of is not _frozen_last)
    planned = ChunkPlan.make(model, (x,), training=training).apply(copy.deepcopy(model))
    found = []
    for each in (model, planned):
        torch.stack([out.square().mean() for out in each(x) if out.requires_grad]).sum().backward()
        found.append({name: value.grad for name, value in each.named_parameters() if value.grad is not None})
    expected, actual = found
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 16, 8), (4, 16, 8)), ((4, 16, 8), (1, 16, 8)), ((4, 16, 8), (2, 4, 16, 8)), ((4, 16, 8), (8,))],
)
def test_a_result_that_is_broadcast_for_other_shapes_has_its_own_memory(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.inner = Block(), nn.Conv1d(16, 16, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.inner(x)
            outputs: Tensor = self.body(h) * y + h
            return outputs

    torch.manual_seed(0)
    model = Scaled().eval()
    planned = ChunkPlan.make(model, (torch.randn(4, 16, 8), torch.randn(4, 16, 8))).apply(
        copy.deepcopy(model)
    )
    x, y = torch.randn(first), torch.randn(second)
    with torch.no_grad():
        torch.testing.assert_close(planned(x, y), model(x, y), rtol=1e-5, atol=1e-6)


def test_a_budget_is_kept_in_inference_mode_and_after_it() -> None:
    torch.manual_seed(0)
    model, x = Model(lambda model, x: model.layers[1](model.layers[0](x))).eval(), torch.randn(64, WIDTH)
    plan = ChunkPlan.make(model, (x,))
    planned = plan.apply(copy.deepcopy(model))
    with torch.inference_mode():
        planned(x)
    assert sum(forward.chunks() for forward in chunked_forwards(planned).values()) > 1
    assert forward_peak_bytes(planned, (x,)) == plan.predicted_peak_bytes < plan.unchunked_peak_bytes
