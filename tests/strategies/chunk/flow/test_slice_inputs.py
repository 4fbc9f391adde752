"""Training loops that take a part of a value, so that its gradient is no larger than that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strategies.chunk.flow.chunk_region import ChunkRegion
from strategies.chunk.flow.grow_region import RegionGrower, seeds_of
from strategies.chunk.flow.slice_inputs import slice_inputs
from strategies.tracing.operator_graph import record_scopes
from strategies.tracing.shadow import Shadow
from tests.strategies.toys import Function


def region_of(forward: Callable[[Tensor], Tensor], around: str) -> ChunkRegion:
    shadow = Shadow.of(Function(forward)).on(torch.device("cpu"))
    assert shadow.mode is not None
    with shadow.mode:
        x = torch.empty(8, 6)
    graph = record_scopes(shadow, frozenset(), (x,), {})[-1].graph
    window = [node for node in graph.nodes if node.op == "call_function"]
    seed = next(node for node in window if node.name.startswith(around))
    region = RegionGrower(window, lambda _: False).region(seeds_of(seed)[0])
    assert region is not None
    return region


@pytest.mark.parametrize(
    ("forward", "members", "before"),
    [
        pytest.param(
            lambda x: (x[:, :2].exp() * 2).tanh(),
            ["exp_default", "mul_tensor", "tanh_default"],
            ["slice_tensor"],
            id="a slice is taken",
        ),
        pytest.param(
            lambda x: (x.t().exp() * 2).tanh(),
            ["t_default", "exp_default", "mul_tensor", "tanh_default"],
            [],
            id="a view of all stays",
        ),
        pytest.param(
            lambda x: (x[:, :2].exp() * x.sum(1, keepdim=True)).tanh(),
            ["slice_tensor", "exp_default", "sum_dim_int_list", "mul_tensor", "tanh_default"],
            [],
            id="what is used whole too stays",
        ),
    ],
)
def test_what_a_region_takes(
    forward: Callable[[Tensor], Tensor], members: list[str], before: list[str]
) -> None:
    region = slice_inputs(region_of(forward, "exp"))
    assert [node.name for node in region.members] == members
    assert [node.name for node in region.before] == before
    assert region.has_sliced_inputs == bool(before)
