"""Graphs of scopes: what is recorded, and what it costs."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.estimate.machine import MACHINES
from strategies.estimate.operator_cost import cost_of
from strategies.tracing.operator_graph import record_scopes
from strategies.tracing.scope_graph import OpaquePart, ScopeGraph
from strategies.tracing.shadow import Shadow, shadowed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.dropout(x, 0.5, self.training)


def recorded(*, with_grad: bool, scopes: tuple[str, ...] = ()) -> list[ScopeGraph]:
    shadow = Shadow.of(Model()).on(torch.device("cpu"))
    inputs = shadowed(shadow, ((torch.randn(3, 4),), {}), torch.device("cpu"))
    with torch.set_grad_enabled(with_grad):
        return record_scopes(shadow, frozenset(scopes), *inputs)


def operators(scope: ScopeGraph) -> list[str]:
    return [str(node.target) for node in scope.graph.nodes if node.op.startswith("call")]


def test_a_scope_is_one_call_of_the_model() -> None:
    first, second, model = recorded(with_grad=False, scopes=("layers.0", "layers.1"))
    assert [first.fqn, second.fqn, model.fqn] == ["layers.0", "layers.1", ""]
    assert (
        operators(first) == operators(second) == ["aten.t.default", "aten.addmm.default", "aten.relu.default"]
    )
    assert operators(model)[:2] == ["layers.0", "layers.1"]


def test_in_place_operators_that_nobody_notices_are_functional() -> None:
    (model,) = recorded(with_grad=True)
    # the mask of dropout takes only the shape of its input
    assert operators(model)[-5:] == [
        "aten.relu.default",
        "aten.empty.memory_format",
        "aten.bernoulli.p",
        "aten.div.Scalar",
        "aten.mul.Tensor",
    ]


def test_parameters_are_read_below_the_scope() -> None:
    first, *_ = recorded(with_grad=True, scopes=("layers.0", "layers.1"))
    assert [node.target for node in first.graph.nodes if node.op == "get_attr"] == ["0.weight", "0.bias"]


def test_costs() -> None:
    first, *_ = recorded(with_grad=False, scopes=("layers.0", "layers.1"))
    product = next(node for node in first.graph.nodes if node.target is torch.ops.aten.addmm.default)
    cost = cost_of(product)
    assert (cost.flops, cost.moved_bytes, cost.rows, cost.is_free) == (96, 4 * (12 + 4 + 12 + 16), 3, False)
    assert cost.seconds(MACHINES["cpu"]) > MACHINES["cpu"].launch_s


def test_a_part_that_cannot_be_planned_is_told_to_another_process() -> None:
    told = OpaquePart("chunk", "sets 'n'", "layers.0", recorded(with_grad=False))
    heard = pickle.loads(pickle.dumps(told))
    assert (type(heard), str(heard), heard.fqn) == (OpaquePart, "chunk: sets 'n'", "layers.0")
