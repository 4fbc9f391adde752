"""State outside of models: tensors that functions name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from strategies.estimate.outer_state import tensor_places

TENSORS = [torch.zeros(1)]
HIDDEN = nn.Linear(1, 1)


class Missing:
    """Stands for a package that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


MISSING = Missing()


def reading_globals() -> Any:
    def of_hidden() -> Any:
        return HIDDEN.bias

    return TENSORS[0] + of_hidden()


class ReadingTensors(nn.Module):
    """Reads tensors that it does not hold."""

    of_class = torch.zeros(1)
    number = 3

    def __init__(self) -> None:
        super().__init__()
        closed, child = torch.zeros(1), nn.Linear(1, 1)
        self.child, self.function = child, lambda: (closed, child)

    def forward(self, x: Any, *, default: Any = torch.ones(1)) -> Any:  # noqa: B008 (this is what is found)
        return reading_globals() + self.function()[0] + self.of_class + default + x


def test_tensors_outside_of_a_model_are_found_with_modules_that_are_none_of_it() -> None:
    found = tensor_places(ReadingTensors())
    assert {each.name for each in found} == {"of_class", "closed", "TENSORS", "HIDDEN", "default"}


class ReadingWhatIsMissing(nn.Module):
    """Names what raises, whatever it is asked for, and holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.package = MISSING

    def forward(self, x: Any) -> Any:
        return x + TENSORS[0] if self.package is MISSING else x


def test_what_stands_for_a_package_that_is_missing_is_asked_for_nothing() -> None:
    assert [each.name for each in tensor_places(ReadingWhatIsMissing())] == ["TENSORS"]


def test_a_variable_that_is_deleted_is_none() -> None:
    closed = torch.zeros(1)

    def delete() -> None:
        nonlocal closed
        del closed

    module = nn.Module()
    vars(module)["function"] = lambda: closed
    (place,) = tensor_places(module)
    assert place.get() is closed
    delete()
    assert place.get() is None
