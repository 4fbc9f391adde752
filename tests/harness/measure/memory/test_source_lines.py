"""What a step makes has the line of the model's code, in forward, in backward and in recomputation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.measure.memory.source_lines import source_line
from harness.measure.step import instrument
from harness.models.base import Batch
from tests.harness.measure.metered import Metered, warmed

HERE = "tests/harness/measure/memory/test_source_lines.py"


class Two(nn.Module):
    """Two products on lines of their own, which the table below names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        result: Tensor = self.down(wide.sin())
        return result


UP = f"{HERE}:{Two.forward.__code__.co_firstlineno + 1}"
DOWN = f"{HERE}:{Two.forward.__code__.co_firstlineno + 2}"


class Model(nn.Module):
    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Two()])
        block = self.layers[0]
        self.run = partial(checkpoint, block, use_reentrant=False) if is_checkpointed else block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.run(x * 2)
        return result


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_tensors_have_the_line_that_made_them_or_whose_backward_did(is_checkpointed: bool) -> None:
    torch.manual_seed(0)
    model = Model(is_checkpointed=is_checkpointed)
    trainee = Metered(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = Batch(inputs=(torch.ones(16, 4),), targets=None)
    report = instrument(warmed(trainee, batch), batch)
    found = {
        (each.work.phase, each.name, each.work.is_recomputed): each.source
        for each in report.operators
        if each.name in {"aten.sin.default", "aten.cos.default", "aten.addmm.default"}
    }
    # of two products in forward the last one stays
    expected = {
        ("forward", "aten.addmm.default", False): DOWN,
        ("forward", "aten.sin.default", False): DOWN,
        ("backward", "aten.cos.default", False): DOWN,
    }
    if is_checkpointed:  # it stops early, before the second product
        expected[("backward", "aten.addmm.default", True)] = UP
        expected[("backward", "aten.sin.default", True)] = DOWN
    assert found == expected
    assert {each.source for each in report.operators if each.work.phase == "optimizer"} == {""}
    modules = {each.source: each.module for each in report.operators if each.node == "AddmmBackward0"}
    assert modules == {DOWN: "layers.0.down", UP: "layers.0.up"}


def test_the_innermost_frame_outside_of_torch_and_acbench_is_named() -> None:
    first = test_the_innermost_frame_outside_of_torch_and_acbench_is_named.__code__.co_firstlineno
    assert source_line() == f"{HERE}:{first + 2}"
    namespace: dict[str, Any] = {"source_line": source_line}
    exec("line = source_line()", namespace)
    assert namespace["line"] == f"{HERE}:{first + 4}"
