"""Matrices of tests: rows that put every two values together run by default, the others by `make matrix`.

Most defects need two factors to meet, rarely three; all pairs need a fifth of the rows of a product or less.

Source: Kuhn, Wallace, Gallo 2004, "Software fault interactions and implications for software testing".
"""

from __future__ import annotations

import heapq
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


def covering(rows: Sequence[Row], *, given: Collection[Row] = (), strength: int = 2) -> list[Row]:
    """Return rows that hold, with those `given`, each combination of values that stands together in any row.

    Greedy: the next row is the first of those that add the most.

    Args:
        rows: every combination that is allowed, cheap ones first.
        given: rows that are there anyway.
        strength: number of values that a combination has.
    """
    parts = [set(combinations(enumerate(row), strength)) for row in rows]
    missing = set().union(*parts)
    for row in given:
        missing.difference_update(combinations(enumerate(row), strength))
    # what a row adds never grows, so that an old count is a bound
    queue = [(-len(part), index) for index, part in enumerate(parts)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        bound, index = heapq.heappop(queue)
        added = len(parts[index] & missing)
        if added == -bound:
            chosen.append(rows[index])
            missing -= parts[index]
        elif added:
            heapq.heappush(queue, (-added, index))
    return chosen
