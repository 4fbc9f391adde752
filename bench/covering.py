"""Rows of a product that together hold every combination of a few of its values.

Most defects need two factors to meet, rarely three; all pairs need a fifth of the rows of a product or less.

Source: Kuhn, Wallace, Gallo 2004, "Software fault interactions and implications for software testing".
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Sequence
from itertools import combinations

Row = tuple[Hashable, ...]


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
