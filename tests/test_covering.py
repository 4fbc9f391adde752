from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

from tests.covering import Row, covering, matrix

FACTORS = (range(4), "abc", (False, True), (0.0, 0.1), "xyz")
ALL = list(product(*FACTORS))
ALLOWED = [row for row in ALL if not (row[0] == 3 and row[1] == "c")]


def pairs(rows: Sequence[Row], strength: int = 2) -> set[Row]:
    return {pair for row in rows for pair in combinations(enumerate(row), strength)}


def test_every_pair_that_is_allowed_stands_in_a_row() -> None:
    for rows in (ALL, ALLOWED):
        chosen = covering(rows)
        assert set(chosen) <= set(rows)
        assert pairs(chosen) == pairs(rows)


def test_every_three_values_stand_in_a_row() -> None:
    chosen = covering(ALLOWED, strength=3)
    assert pairs(chosen, 3) == pairs(ALLOWED, 3)
    assert len(chosen) <= 48  # 36 rows are the least: four values stand with three and three


def test_a_product_needs_few_of_its_rows() -> None:
    assert len(ALL) == 144
    assert len(covering(ALL)) <= 16  # 12 rows are the least: four values stand with three


def test_rows_that_are_given_count() -> None:
    given = ALL[-5:]
    assert pairs([*given, *covering(ALL, given=given)]) == pairs(ALL)
    assert covering(given, given=given) == []


def test_the_same_rows_are_chosen_again() -> None:
    assert covering(ALL) == covering(list(ALL))


def test_the_other_rows_are_marked() -> None:
    last = ALL[-1]
    found = matrix(ALL, always=[last])
    assert [tuple(each.values) for each in found] == ALL
    unmarked = [tuple(each.values) for each in found if not each.marks]
    assert set(unmarked) == {last, *covering(ALL, given=[last])}
    assert found[0].id == "0-a-False-0.0-x"
