"""Matrices of tests: rows that put every two values together run by default, the others by `make matrix`.

Most defects need two factors to meet, rarely three; all pairs need a fifth of the rows of a product or less.

Source: Kuhn, Wallace, Gallo 2004, "Software fault interactions and implications for software testing".
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations

import pytest
from _pytest.mark import ParameterSet

Row = tuple[Hashable, ...]


def matrix(rows: Sequence[Row], *, always: Collection[Row] = ()) -> list[ParameterSet]:
    """Return one parameter set a row; those that no pair needs are marked `matrix`.

    Args:
        rows: every combination that is allowed, cheap ones first; values are named by `str`.
        always: rows that run by default for a reason of their own.
    """
    return marked(rows, [*always, *covering(rows, given=always)])


def marked(rows: Sequence[Row], chosen: Collection[Row]) -> list[ParameterSet]:
    """Return one parameter set a row; those that are not chosen are marked `matrix`."""
    return [
        pytest.param(*row, id="-".join(map(str, row)), marks=[] if row in chosen else [pytest.mark.matrix])
        for row in rows
    ]


def covering(rows: Sequence[Row], *, given: Collection[Row] = ()) -> list[Row]:
    """Return rows that hold, with those `given`, each pair of values that stands together in any row.

    Greedy: the next row is the first of those that add the most pairs.
    """
    missing = set().union(*map(_pairs, rows)) - set().union(*map(_pairs, given))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(row: Row) -> set[Row]:
    return set(combinations(enumerate(row), 2))
