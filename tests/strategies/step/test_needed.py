"""The walk from readers back to what they follow from."""

from __future__ import annotations

import pytest

from strategies.step.needed import needed

BEFORE = {0: [], 1: [0], 2: [0], 3: [1, 2], 4: [3, 4], 5: []}
"""A diamond below 3, a loop at 4, and 5 alone."""


@pytest.mark.parametrize(
    ("first", "found"),
    [
        pytest.param([], set(), id="nothing"),
        pytest.param([5], {5}, id="one that needs nothing"),
        pytest.param([3], {0, 1, 2, 3}, id="a diamond"),
        pytest.param([4, 5], {0, 1, 2, 3, 4, 5}, id="several, one in a loop"),
    ],
)
def test_what_is_needed(first: list[int], found: set[int]) -> None:
    asked = []

    def before(item: int) -> list[int]:
        asked.append(item)
        return BEFORE[item]

    assert needed(first, before) == found
    assert sorted(asked) == sorted(found)  # each is asked once
