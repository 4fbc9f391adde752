"""Equal views of one value are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from strategies.tracing.operator_graph import record
from strategies.tracing.shadow import Shadow, shadowed
from tests.strategies.toys import Function


def written(x: Tensor) -> Tensor:
    buffer = torch.zeros(12)
    one, other = buffer.view(3, 4), buffer.view(3, 4)
    one[0] = x[0]
    return other * 2


@pytest.mark.parametrize(
    ("function", "views"),
    [
        pytest.param(lambda x: x.view(12).sin() + x.view(12).cos(), 1, id="equal"),
        pytest.param(lambda x: x.view(12).sin() + x.view(1, 12).cos(), 2, id="of other sizes"),
        pytest.param(lambda x: x.t().t().sin() + x.t().t().cos(), 2, id="views of views"),
        pytest.param(written, 2, id="of what is written"),
        pytest.param(lambda x: (x.view(12), x.view(12).sin()), 2, id="returned"),
        pytest.param(lambda x: x.view(12).sin() + x.sin().view(12), 2, id="of other values"),
    ],
)  # fmt: skip
def test_equal_views_are_one(function: Callable[[Tensor], Any], views: int) -> None:
    x = torch.randn(3, 4)
    device = torch.device("cpu")
    model = Function(function)

    def cast() -> Any:
        shadow = Shadow.of(model).on(device)
        return shadow, *shadowed(shadow, ((x,), {}), device)

    (scope,) = record(cast, frozenset(), {}).graphs
    names = [str(node.target) for node in scope.graph.nodes if node.op == "call_function"]
    assert sum("view" in name or "aten.t." in name for name in names) == views
