"""Products whose gradients are added to totals at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies.chunk.loops.accumulating_products import product

_RNG = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_RNG, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        pytest.param("mm", (drawn(3, 4), drawn(4, 5)), id="matrices"),
        pytest.param("mm", (drawn(3, 4), drawn(5, 4).t()), id="a transposed weight"),
        pytest.param("bmm", (drawn(2, 3, 4), drawn(2, 4, 5)), id="batches"),
        pytest.param("bmm", (drawn(2, 3, 4), drawn(2, 5, 4).transpose(1, 2)), id="a transposed batch"),
        pytest.param("addmm", (drawn(5), drawn(3, 4), drawn(4, 5)), id="with a bias"),
        pytest.param("addmm", (drawn(1), drawn(3, 4), drawn(4, 5)), id="with a bias of one element"),
    ],
)
@pytest.mark.parametrize("with_totals", [(), (-1,), (-2,), (-1, -2)], ids=str)
def test_gradients_are_those_of_the_operator(
    name: str, operands: tuple[Tensor, ...], with_totals: tuple[int, ...]
) -> None:
    expected = [
        each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in operands
    ]
    actual = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in operands]
    totals = {position: torch.ones_like(actual[position]) for position in with_totals}
    for position, total in totals.items():
        actual[position].grad = total
    plain = getattr(torch, name)(*expected)
    result = product(*actual)
    assert torch.equal(result, plain)
    gradient = drawn(*plain.shape)
    plain.backward(gradient)
    result.backward(gradient)
    for position in range(-len(operands), 0):
        one, other = actual[position].grad, expected[position].grad
        assert one is not None
        assert other is not None
        added = other + 1 if position in totals else other
        torch.testing.assert_close(one, added, rtol=1e-12, atol=1e-12)
    assert all(actual[position].grad is total for position, total in totals.items())


def test_an_operand_without_gradient_gets_none() -> None:
    left, right = drawn(3, 4), drawn(4, 5).requires_grad_()
    right.grad = torch.zeros_like(right)
    product(left, right).sum().backward()
    assert left.grad is None
    torch.testing.assert_close(right.grad, left.sum(0, keepdim=True).t().expand(4, 5))
