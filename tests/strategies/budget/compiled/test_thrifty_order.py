"""The order of few bytes: operators whose results die early come first, and the order given wins a tie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from strategies.budget.compiled.thrifty_order import Step, thrifty_order


def step(*after: int, uses: Sequence[int] = (), makes: int = 0, size: int = 0, beside: int = 0) -> Step:
    """Return a step that makes at most one storage; a number of 0 makes none."""
    made = {makes: size} if makes else {}
    return Step(after=frozenset(after), uses=frozenset(uses), makes=made, beside_bytes=beside)


ROWS = {
    "nothing": ([], {}, []),
    "a tie": ([step(makes=1, size=4), step(makes=2, size=4)], {}, [0, 1]),
    "wide results are used up one by one": (
        [
            step(uses=[9], makes=1, size=8),
            step(uses=[9], makes=2, size=8),
            step(0, uses=[1], makes=3, size=1),
            step(1, uses=[2], makes=4, size=1),
        ],
        {9: 8},
        [0, 2, 1, 3],
    ),
    "what is made again waits until others are gone": (
        [step(uses=[7], makes=1, size=2, beside=8), step(uses=[8], makes=2, size=1)],
        {7: 4, 8: 6},
        [1, 0],
    ),
    "what nobody frees waits until nothing else fits": (
        [
            step(uses=[9], makes=3, size=2),
            step(0, uses=[3]),  # a view of it, its last reader
            step(uses=[9], makes=1, size=4),
            step(2, uses=[1, 7], makes=2, size=4),
        ],
        {7: 4, 9: 1},
        [2, 3, 0, 1],
    ),
}


@pytest.mark.parametrize(("steps", "held", "expected"), ROWS.values(), ids=ROWS)
def test_the_order_needs_the_fewest_bytes(
    steps: list[Step], held: dict[int, int], expected: list[int]
) -> None:
    outliving = frozenset({3, 4})
    assert list(thrifty_order(steps, held, outliving)) == expected
