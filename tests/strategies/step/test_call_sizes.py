"""Sizes that a plan is made for, and how those of a call are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from strategies.step.call_sizes import difference, size_key, sizes_of

ROWS = torch.ones(32, 8)
DIFFERENT = {
    "the same": (8, (ROWS,), None),
    "more rows": (8, (torch.ones(128, 8),), "made for input 0 of (32, 8), not (128, 8)"),
    "fewer rows": (8, (ROWS[:3],), None),
    "more dimensions": (8, (ROWS[None],), "made for input 0 of (32, 8), not (1, 32, 8)"),
    "another type": (
        8,
        (ROWS.double(),),
        "made for input 0 of (32, 8) float32 on cpu, not (32, 8) float64 on cpu",
    ),
    "another device": (
        8,
        (ROWS.to("meta"),),
        "made for input 0 of (32, 8) float32 on cpu, not (32, 8) float32 on meta",
    ),
    "a smaller weight": (4, (ROWS,), "made for parameter weight of (2, 8), not (2, 4)"),
    "one input less": (8, (), "made for input 0 of (32, 8) float32 on cpu, not (2,) bool on cpu"),
    "one input more": (
        8,
        (ROWS, torch.ones(2, dtype=torch.bool)),
        "made without input 2 of (2,) bool on cpu",
    ),
}


def renamed(module: nn.Sequential) -> None:
    module.add_module("last", module.pop(1))


def tied(module: nn.Sequential) -> None:
    module[1].weight = module[0].weight


def doubled(module: nn.Sequential) -> None:
    module[0].double()


def without_bias(module: nn.Sequential) -> None:
    module[1].register_parameter("bias", None)


def with_another_weight(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.ones(3, 8))


CHANGED = (renamed, tied, doubled, without_bias, with_another_weight)


@pytest.mark.parametrize("change", CHANGED)
def test_a_module_of_other_sizes_has_another_key(change: Callable[[nn.Sequential], None]) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sizes, key = sizes_of(module, (ROWS,), {}), size_key(module, (ROWS,), {})
    assert size_key(module, (torch.zeros(32, 8),), {}) == key
    assert size_key(module, (ROWS[:3],), {}) != key
    change(module)
    assert sizes_of(module, (ROWS,), {}) != sizes
    assert size_key(module, (ROWS,), {}) != key


def test_a_model_that_was_made_float64_is_as_it_was_planned() -> None:
    planned = sizes_of(nn.Linear(8, 2), (ROWS, torch.ones(3, dtype=torch.long)), {})
    double = nn.Linear(8, 2).double()
    for rows, problem in ((ROWS[:3], None), (torch.ones(33, 8), "made for input 0 of (32, 8), not (33, 8)")):
        found = sizes_of(double, (rows.double(), torch.ones(3, dtype=torch.long)), {})
        assert difference(planned, found) == problem


@pytest.mark.parametrize(("width", "inputs", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_is_named(width: int, inputs: tuple[Tensor, ...], expected: str | None) -> None:
    mask = {"mask": torch.ones(2, dtype=torch.bool)}
    planned = sizes_of(nn.Linear(8, 2), (ROWS,), mask)
    assert difference(planned, sizes_of(nn.Linear(width, 2), inputs, mask)) == expected
