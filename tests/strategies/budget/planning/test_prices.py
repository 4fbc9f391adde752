"""What bytes are worth in the choice over blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from strategies.budget.planning.block_choice import Columns
from strategies.budget.planning.prices import Price, Room, Waiting, price_of, prices


def columns(*options: tuple[int, int, float]) -> Columns:
    """Return options: what each leaves, its highest total and its cost."""
    left, highest = (np.array([each[number] for each in options], dtype=np.int64) for number in range(2))
    cost = np.array([each[2] for each in options], dtype=np.float64)
    return left, highest, cost, np.zeros_like(left)


TWO = columns((50, 60, 0.0), (10, 40, 8.0))
CASES: dict[str, tuple[Sequence[Columns], Sequence[int], int, Sequence[Price]]] = {
    "a budget that needs nothing": ([TWO, TWO], [0, 0], 200, [Price(0, 0), Price(0, 0)]),
    # of one block, 10 bytes less cost half of what all 20 do
    "the highest moment of one block": ([columns((50, 100, 0.0), (10, 80, 8.0))], [0], 90, [Price(0, 0.4)]),
    "what waits behind the last block": ([TWO], [20], 60, [Price(0.2, 0)]),
    # the second block runs while the first waits: 50 + 60 bytes, and 10 of them are too many
    "what waits while another runs": ([TWO, TWO], [0, 0], 100, [Price(0.2, 0), Price(0, 0.2)]),
}


@pytest.mark.parametrize(("parts", "between", "budget", "expected"), CASES.values(), ids=CASES)
def test_a_byte_is_worth_what_one_more_spares(
    parts: Sequence[Columns], between: Sequence[int], budget: int, expected: Sequence[Price]
) -> None:
    found = prices(parts, between, budget)
    assert [tuple(each) for each in found] == [pytest.approx(tuple(each)) for each in expected]


def test_bytes_have_a_price_where_no_option_fits() -> None:
    (price,) = prices([TWO], [0], 30)
    assert price.highest > 0.4


WAITING = Waiting(np.array([30, 20, 10]), np.array([50, 60, 40]), np.array([0, 15, 25]), 100)
"""Three blocks in 100 bytes: what waits, the highest totals, and those between them."""


@pytest.mark.parametrize(
    ("first", "last", "room"),
    [
        # the second may be as high as 100 - 60 beside it; behind the third wait 20 + 10 bytes beside 25
        (0, 0, Room(left=40, highest=100)),
        (1, 1, Room(left=30, highest=70)),
        (2, 2, Room(left=25, highest=50)),
        (0, 1, Room(left=60, highest=100)),
        (0, 2, Room(left=75, highest=100)),
    ],
)
def test_a_block_has_the_room_that_others_leave(first: int, last: int, room: Room) -> None:
    assert WAITING.room(first, last) == room


def test_several_blocks_as_one_have_the_prices_of_all_their_moments() -> None:
    priced = [Price(left=7, highest=1), Price(left=4, highest=2), Price(left=3, highest=0.5)]
    assert price_of(priced, 0, 0) == priced[0]
    assert price_of(priced, 1, 1) == priced[1]
    assert price_of(priced, 0, 2) == Price(left=3, highest=5)
