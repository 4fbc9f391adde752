"""Operators by which DTensor learns a shape are no operators of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.measure.sharding_rules import unseen_sharding_rules
from harness.measure.step import runnable_step
from strategies.step.operator_mode import OperatorMode


class _Products(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def around_a_step() -> AbstractContextManager[None]:
    """Return the scope in which others watch a step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    trainee: Any = SimpleNamespace(model=model, optimizer=optimizer, zero_grad=optimizer.zero_grad)
    return runnable_step(trainee, torch.zeros(1)).around()


@pytest.mark.parametrize(
    ("scope", "rows", "shapes"),
    [
        pytest.param(unseen_sharding_rules, 5, [(5, 6)], id="a new size"),
        pytest.param(around_a_step, 6, [(6, 6)], id="a new size, where a plan is made of the step"),
        pytest.param(nullcontext, 7, [(7, 12), (7, 6)], id="as DTensor does it"),
    ],
)
def test_the_product_of_the_whole_is_not_counted(
    scope: Any, rows: int, shapes: list[tuple[int, int]], mesh: DeviceMesh
) -> None:
    x = DTensor.from_local(torch.zeros(rows, 4), mesh, [Replicate()])
    weight = DTensor.from_local(torch.zeros(4, 6), mesh, [Shard(1)])
    with scope(), _Products() as seen:
        x @ weight
    assert seen.shapes == shapes
