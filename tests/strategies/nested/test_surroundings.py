from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies.generators import CPU
from strategies.nested.surroundings import DrawnNumbers


@pytest.mark.parametrize("without_values", [False, True], ids=["real tensors", "tensors without values"])
@pytest.mark.parametrize("draws", [False, True], ids=["nothing drawn", "drawn"])
def test_numbers_drawn_in_between_are_noticed(*, without_values: bool, draws: bool) -> None:
    drawn = DrawnNumbers([CPU])
    drawn.note()
    if draws:
        torch.rand(1)
    if without_values:
        with FakeTensorMode():
            found = drawn.set_in_between()
    else:
        found = drawn.set_in_between()
    assert bool(found) == draws
