"""Kept results: what writes to them make of them, whichever version counter counts the write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strategies import StrategyError
from strategies.regions.operator_names import resolve
from strategies.regions.policy import selective_contexts
from tests.strategies.toys import WIDTH

PRODUCTS = ("aten.mm.default", "aten.addmm.default")
Call: TypeAlias = Callable[..., Any]


class Region(nn.Module):
    """A forward that is a function of two layers and an input."""

    def __init__(self, function: Call, after: Call = lambda y: y, layer: Call | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False) if layer is None else layer(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.function, self.after = function, after

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return func(*args, **(kwargs or {}))


def gradients(region: Region, call: Call) -> tuple[list[Tensor | None], int]:
    """Return the gradients of one step, and how many products its backward runs."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    outputs, products = call(x), Products()
    loss = region.after(outputs).square().sum()
    with products:
        loss.backward()
    return [x.grad, *(p.grad for p in region.parameters())], products.count


def written_gates(m: Region, x: Tensor) -> Tensor:
    first, second = m.first(x).unsafe_chunk(2, -1)
    gates = torch.cat([first.sigmoid_() * x[..., : WIDTH // 2], second.tanh_() * 2], -1)
    y: Tensor = m.second(gates.sin()).sin()
    return y


def packed(m: Region, x: Tensor) -> Tensor:
    values: Tensor = m.first(pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True))[0].data
    y: Tensor = m.second(values.sin())
    return y


CASES: dict[str, tuple[Call, int]] = {
    # name: (region, products that the recomputation runs beside those of backward)
    "nothing is written": (partial(Region, lambda m, x: m.second(m.first(x).sin()).sin()), 0),
    "a product of three dimensions": (
        partial(Region, lambda m, x: m.second(m.first(x).mul_(3).sin()).sin()),
        1,
    ),
    "a product of two dimensions": (
        partial(Region, lambda m, x: m.second(m.first(x[0]).mul_(3).sin()).sin()),
        1,
    ),
    "the second of two": (partial(Region, lambda m, x: m.second(m.first(x).sin()).add_(1).sin()), 1),
    "a slice of it": (
        partial(Region, lambda m, x: (y := m.first(x), y[0].add_(1), m.second(y.sin()).sin())[2]),
        1,
    ),
    "its detached tensor": (
        partial(Region, lambda m, x: (y := m.first(x), y.detach().add_(1), m.second(y.sin()).sin())[2]),
        1,
    ),
    "its data, which has a counter of its own": (
        partial(Region, lambda m, x: (y := m.first(x), y.data.add_(1), m.second(y.sin()).sin())[2]),
        1,
    ),
    "parts with counters of their own": (partial(Region, written_gates), 1),
    "by an operator of many": (
        partial(
            Region, lambda m, x: (y := m.first(x), torch._foreach_mul_([y], 2), m.second(y.sin()).sin())[2]
        ),
        1,
    ),
    "by a result that is given": (
        partial(
            Region,
            lambda m, x: (y := m.first(x), torch.sin(x.detach(), out=y.data), m.second(y.cos()).sin())[2],
        ),
        1,
    ),
    "a GRU": (partial(Region, lambda m, x: m.second(m.first(x)[0].sin()), layer=nn.GRU), 3),
    "an LSTM": (partial(Region, lambda m, x: m.second(m.first(x)[0].sin()), layer=nn.LSTM), 0),
    "a recurrent layer": (partial(Region, lambda m, x: m.second(m.first(x)[0].sin()), layer=nn.RNN), 3),
    "a packed LSTM": (
        partial(Region, packed, layer=partial(nn.LSTM, batch_first=True)),
        5,
    ),
    "what is returned, after the region": (
        partial(Region, lambda m, x: (y := m.first(x), m.second(y.sin()).sin() + x * 2)[1]),
        0,
    ),
}


@pytest.mark.parametrize(("make", "again"), CASES.values(), ids=CASES)
def test_gradients_are_those_without_a_region(make: Call, again: int) -> None:
    plain, region = make(), make()
    contexts = partial(selective_contexts, resolve(PRODUCTS, 0), set())
    expected, without = gradients(plain, plain)
    actual, products = gradients(
        region, partial(checkpoint, region, use_reentrant=False, context_fn=contexts)
    )
    assert all(map(torch.equal, expected, actual))  # type: ignore[arg-type]
    assert products - without == again


def test_a_write_to_many_views_is_refused() -> None:
    region = Region(lambda m, x: (y := [m.second(x)[:]], torch._foreach_mul_(y, 2), y[0].sin())[2])
    contexts = partial(selective_contexts, resolve(PRODUCTS, 0), set())
    with pytest.raises(StrategyError) as error:
        gradients(region, partial(checkpoint, region, use_reentrant=False, context_fn=contexts))
    assert str(error.value) == (
        "ac: aten._foreach_mul_.Scalar writes to views, and torch loses that where operators are watched, as "
        "ac=selective_op does; write to one tensor at a time, or use ac=full"
    )
