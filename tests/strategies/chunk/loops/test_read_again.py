"""Products that backward of a loop leaves out: it reads their operands alone, or forward has kept them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.chunk.flow.grow_region import RegionGrower, seeds_of
from strategies.chunk.loops.backward import saved_storages, with_backward
from strategies.chunk.loops.loop import Loop, make_loop
from strategies.chunk.loops.read_again import most_worth_keeping
from strategies.chunk.running.schedule_code import chunk_loop
from strategies.estimate.liveness import Storages
from strategies.estimate.machine import MACHINES
from strategies.tracing.operator_graph import record_scopes
from strategies.tracing.shadow import Shadow, shadowed
from tests.strategies.toys import Function

ROWS, LENGTH, PRODUCTS = 6, 2, 2
_NAMES = {"addmm", "addmm_", "mm"}


class Counted(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _NAMES:
            self.total += 1
        return result


def loop_of(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], n_kept: int = 0) -> Loop:
    """Return the loop over rows of all operators of `function`, which keeps values most worth it."""
    shadow = Shadow.of(Function(function)).on(torch.device("cpu"))
    (scope,) = record_scopes(shadow, frozenset(), *shadowed(shadow, (inputs, {}), torch.device("cpu")))
    window: list[fx.Node] = [node for node in scope.graph.nodes if node.op == "call_function"]
    region = RegionGrower(window, lambda _: False).region(seeds_of(window[-1])[0])
    assert region is not None
    assert region.members == window
    storages = Storages.of_graph(scope.graph)
    saves, kept = saved_storages(scope.graph), frozenset[fx.Node]()
    while True:
        loop = make_loop(region, {window[-1]}, LENGTH, storages, kept)
        found = loop and with_backward(loop, storages, saves)
        assert found is not None
        if len(kept) == n_kept:
            return found
        best = most_worth_keeping(found, storages, saves, MACHINES["cuda"])
        assert best is not None
        kept |= {best}


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (x @ up @ down) * x.sigmoid()


def judged(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return functional.cross_entropy(x @ up @ down, x.new_zeros(len(x), dtype=torch.long), reduction="none")


@pytest.mark.parametrize(
    ("function", "again"),
    [
        pytest.param(lambda x, up, down: (x @ up).relu() @ down, 1, id="the last of two"),
        pytest.param(lambda x, up, down: x + (x @ up).relu() @ down, 1, id="in front of a sum"),
        pytest.param(lambda x, up, down: (x @ up @ down) * 2, 1, id="in front of a number's product"),
        pytest.param(gated, 2, id="in front of a gate"),
        pytest.param(lambda x, up, down: (x @ up @ down).relu(), 2, id="in front of a function"),
        pytest.param(judged, 2, id="in front of a loss"),
        pytest.param(lambda x, up, down: torch.where(x @ up @ down > 0, x, x * 2), 2, id="in a mask"),
    ],
)  # fmt: skip
def test_products_that_nobody_reads_are_left_out(function: Callable[..., Tensor], again: int) -> None:
    inputs = operands()
    loop = loop_of(function, inputs)
    assert len(loop.unread) == PRODUCTS - again
    assert_gradients(loop, function, inputs, again)


@pytest.mark.parametrize(
    ("function", "n_kept", "again"),
    [
        pytest.param(lambda x, up, down: (x @ up).relu() @ down, 1, 0, id="in front of a function"),
        pytest.param(lambda x, up, down: (x + (x @ up).relu() @ down).relu(), 1, 1, id="a sum"),
        pytest.param(lambda x, up, down: (x + (x @ up).relu() @ down).relu(), 2, 0, id="a sum and a product"),
        pytest.param(lambda x, up, down: ((x.sin() @ up).sin() @ down).sin(), 2, 0, id="two products"),
        pytest.param(gated, 1, 1, id="a gated product"),
    ],
)  # fmt: skip
def test_what_is_kept_is_not_computed_again(function: Callable[..., Tensor], n_kept: int, again: int) -> None:
    inputs = operands()
    loop = loop_of(function, inputs, n_kept)
    assert len(loop.kept) == n_kept
    assert_gradients(loop, function, inputs, again)


def operands() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*shape).requires_grad_() for shape in ((ROWS, 5), (5, 16), (16, 5)))


def assert_gradients(
    loop: Loop, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], again: int
) -> None:
    """Compare a loop's gradients with those of the operators, and count what it computes for them."""
    known = dict(zip(loop.region.members[0].graph.find_nodes(op="placeholder"), inputs, strict=True))
    loss = function(*inputs).square().sum()
    with Counted() as in_gradients:
        expected = torch.autograd.grad(loss, inputs, materialize_grads=True)
    results = chunk_loop(loop, is_unread=False)(*(known[operand.node] for operand in loop.inputs))
    result = results if isinstance(results, Tensor) else results[-1]
    loss = result.square().sum()
    with Counted() as counted:
        found = torch.autograd.grad(loss, inputs, materialize_grads=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert counted.total == ROWS // LENGTH * (again + in_gradients.total)


def test_a_forward_without_gradients_leaves_nothing_out() -> None:
    with torch.no_grad():
        loop = loop_of(lambda x, up: x @ up, (torch.randn(ROWS, 5), torch.randn(5, 4)))
    assert not loop.unread
