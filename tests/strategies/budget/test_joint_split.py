"""Splitting a joint graph: forward and backward compute the same whatever is kept, with no operator more."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from strategies.budget.joint_split import split
from tests.strategies.budget.test_joint_graph import joint_of, no_trace_of_a_compiler

__all__ = ["no_trace_of_a_compiler"]


def branching(x: Tensor) -> Tensor:
    a = x.sin()
    b = torch.nn.functional.layer_norm(a @ a.t(), (4,))
    return (b.exp() * b.cos()).t()


def test_every_kept_set_gives_the_same_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    tangent = torch.randn(4, 4)
    (expected,) = torch.autograd.grad(branching(x), x, tangent)
    graph = joint_of(branching)
    asked = sorted(graph.asked, key=lambda node: node.name)
    count = 0
    for size in range(len(asked) + 1):
        for kept in combinations(asked, size):
            forward, backward = split(graph, frozenset(kept))
            result, *saved = forward(x.detach())
            (gradient,) = backward(*saved, tangent)
            assert torch.equal(result, branching(x))
            assert torch.equal(gradient, expected)
            count += 1
            ran = [node.target for node in backward.graph.nodes if node.op == "call_function"]
            assert ran.count(torch.ops.aten.native_layer_norm.default) <= 1
    assert count == 2 ** len(asked)
