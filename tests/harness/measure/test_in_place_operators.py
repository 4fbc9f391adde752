"""Watching a step changes none of its operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.measure.in_place_operators import AsUnwatched
from harness.measure.memory import counting_allocator as counting
from harness.measure.memory.counting_allocator import counting_allocator
from harness.measure.step import instrument
from tests.harness.measure.metered import REGIONS, tokens, transformer, warmed

needs_compiler = pytest.mark.skipif(
    counting.build() is None, reason="no C++ compiler for the counting allocator"
)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("region", REGIONS)
def test_the_instrumented_step_runs_the_operators_of_a_plain_one(region: str) -> None:
    trainee, batch = transformer(region, dropout=0.1), tokens()
    with Recorder() as plain, AsUnwatched():
        warmed(trainee, batch)
    with Recorder() as watched:
        instrument(trainee, batch)
    assert watched.ops == plain.ops


def _attention(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def _indices() -> Tensor:
    return torch.tensor([0, 2, 2, 5])


BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(0, _indices()),
    "indexing by a tensor": lambda x: x[_indices()],
    "indexing by two tensors": lambda x: x[_indices(), _indices()],
    "indexing by a mask": lambda x: x[x > 0],
    "gather": lambda x: x.gather(1, torch.zeros(8, 1, dtype=torch.int64)),
    "topk": lambda x: x.topk(2)[0],
    "sort": lambda x: x.sort()[0],
    "max over a dimension": lambda x: x.max(1)[0],
    "two uses": lambda x: x.sin() * x.cos(),
    "three uses": lambda x: x.sin() + x.cos() + x.exp(),
    "a residual": lambda x: (h := x * 2) + (h @ h).sin(),
    "residuals in a row": lambda x: (h := x + x.exp()) + (h @ h).sin(),
    "uses through transposed views": lambda x: (x.t() @ x).sin() + (x @ x.t()).cos(),
    "one operand twice": lambda x: (h := x.exp()) * h + x.sin(),
    "a matrix by itself": lambda x: ((h := x.sin()) @ h).cos(),
    "a shared gradient": lambda x: ((h := x * 2) + 1) + (h + 2),
    "a formula with a sum": lambda x: x.std(0) + x.logit(0.1).sum(),
    "math attention": lambda x: _attention(x[None, None]),
    "math attention in a region": lambda x: checkpoint(_attention, x[None, None], use_reentrant=False),
}


@needs_compiler
@pytest.mark.parametrize("name", BACKWARDS)
def test_allocations_and_gradients_are_those_without_a_mode(name: str) -> None:
    counter = counting_allocator()
    assert counter is not None
    x = torch.linspace(0.1, 0.9, 64).reshape(8, 8).requires_grad_()

    def run() -> tuple[int, int, Tensor]:
        before = counter.read()
        (gradient,) = torch.autograd.grad(BACKWARDS[name](x).sum(), x)
        after = counter.read()
        return (
            after.allocations - before.allocations,
            after.allocated_bytes - before.allocated_bytes,
            gradient,
        )

    assert counter.install()
    expected = run()
    with Recorder(), AsUnwatched():
        actual = run()
    counter.uninstall()
    assert actual[:2] == expected[:2]
    assert torch.equal(actual[2], expected[2])
