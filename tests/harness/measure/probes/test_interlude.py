"""An evaluation between forward and backward leaves the model as it was; smaller micro-batches are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from harness.measure.probes.interlude import interlude, smaller, turned
from harness.models.base import Batch


def test_evaluates_without_gradients_and_puts_modes_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    seen: list[tuple[bool, bool]] = []
    before = torch.get_rng_state(), random.getstate()
    interlude(model, lambda: seen.append((model[0].training, torch.is_grad_enabled())), torch.device("cpu"))
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == [True, True, False]
    assert not torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() != before[1]


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        pytest.param((torch.ones(4, 6),), [(2, 6), (4, 6)], id="rows"),
        pytest.param(
            (torch.ones(4, 6, dtype=torch.int64),), [(2, 3), (2, 6), (4, 6)], id="rows and columns of tokens"
        ),
        pytest.param((torch.ones(4, 6), torch.ones(3)), [(4, 6)], id="rows that differ"),
        pytest.param((torch.ones(1, 6),), [(1, 6)], id="one row"),
        pytest.param((torch.ones(()),), [()], id="no dimension"),
    ],
)
def test_smaller(inputs: tuple[Any, ...], shapes: list[tuple[int, ...]]) -> None:
    given = Batch(inputs=inputs, targets=None)
    assert [tuple(each.inputs[0].shape) for each in smaller(given)] == shapes
    assert smaller(given)[-1] is given


def test_turned_keeps_sizes_and_kinds() -> None:
    given = Batch(
        inputs=(torch.tensor([[1, 2, 3]]), torch.tensor(5)),
        targets=torch.tensor([0]),
        keywords={"x": torch.tensor([[0.0, 1.0]], requires_grad=True)},
    )
    turned_round = turned(given)
    assert torch.equal(turned_round.inputs[0], torch.tensor([[3, 2, 1]]))
    assert torch.equal(turned_round.inputs[1], torch.tensor(5))
    assert torch.equal(turned_round.targets, torch.tensor([0]))
    assert torch.equal(turned_round.keywords["x"], torch.tensor([[1.0, 0.0]]))
    assert turned_round.keywords["x"].is_leaf
    assert turned_round.keywords["x"].requires_grad
