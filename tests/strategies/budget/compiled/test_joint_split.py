"""Splitting a joint graph: forward and backward compute the same whatever is kept, with no operator more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from strategies.budget.compiled.joint_split import split
from tests.strategies.budget.compiled.test_joint_graph import joint_of, no_trace_of_a_compiler

__all__ = ["no_trace_of_a_compiler"]


def branching(x: Tensor) -> Tensor:
    a = x.sin()
    b = torch.nn.functional.layer_norm(a @ a.t(), (4,))
    return (b.exp() * b.cos()).t()


@pytest.mark.parametrize("is_again", [False, True])
def test_every_kept_set_gives_the_same_gradient(*, is_again: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    tangent = torch.randn(4, 4)
    (expected,) = torch.autograd.grad(branching(x), x, tangent)
    graph = joint_of(branching)
    asked = sorted(graph.asked, key=lambda node: node.name)
    count = most = 0
    for size in range(len(asked) + 1):
        for kept in combinations(asked, size):
            again = frozenset(asked).difference(kept) if is_again else frozenset()
            forward, backward = split(graph, frozenset(kept), again=again)
            result, *saved = forward(x.detach())
            (gradient,) = backward(*saved, tangent)
            assert torch.equal(result, branching(x))
            assert torch.equal(gradient, expected)
            count += 1
            ran = [node.target for node in backward.graph.nodes if node.op == "call_function"]
            norms = ran.count(torch.ops.aten.native_layer_norm.default)
            assert norms <= 1 or (is_again and norms <= len(asked))
            most = max(most, norms)
    assert count == 2 ** len(asked)
    assert (most > 1) == is_again


def test_what_may_not_run_again_is_kept_where_nothing_else_is() -> None:
    def noisy(x: Tensor) -> Tensor:
        return ((x.exp() + torch.randn_like(x)).cos() * torch.rand_like(x)).sin()

    graph = joint_of(noisy)
    assert {str(node.target) for node in graph.unrepeatable} == {
        "aten.randn_like.default",
        "aten.rand_like.default",
    }
    _, backward = split(graph, graph.unrepeatable)
    ran = {str(node.target) for node in backward.graph.nodes if node.op == "call_function"}
    assert {"aten.exp.default", "aten.cos.default"} <= ran
    assert not any("rand" in name for name in ran)


@pytest.fixture
def group() -> Iterator[None]:
    """Be one of two ranks without a backend."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_that_backward_does_not_read_is_not_in_it() -> None:
    def summed(x: Tensor) -> Tensor:
        total: Tensor = functional.all_reduce(x.detach() * 2, "sum", [0, 1])
        return (x.sin() + total).cos()

    graph = joint_of(summed)
    (kept,) = (node for node in graph.asked if str(node.target) == "aten.add.Tensor")
    forward, backward = split(graph, frozenset({kept}))
    collectives = [
        [node.name for node in each.graph.nodes if "c10d" in str(node.target)] for each in (forward, backward)
    ]
    assert collectives == [["all_reduce", "wait_tensor"], []]
