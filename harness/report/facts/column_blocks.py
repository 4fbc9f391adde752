"""The split of columns into several tables, where one with all of them would be too wide to read."""

from __future__ import annotations

from collections.abc import Sequence

NARROW = 80
"""Characters of a line that fits anywhere."""


def column_blocks(
    lines: Sequence[Sequence[int]], *, named: int, gap: int, limit: int = NARROW
) -> list[list[int]]:
    """Return the columns of each table, by their numbers, in order; the first `named` are in every table.

    One table has all columns where they fit, and where some column fits beside the named ones in none.

    Args:
        lines: characters of each cell, a sequence a line; one line where columns are padded.
        named: columns that say what a row is about.
        gap: characters that each cell adds to its own.
    """
    names, others = list(range(named)), range(named, len(lines[0]))

    def fits(columns: Sequence[int]) -> bool:
        return all(sum(line[column] + gap for column in columns) <= limit for line in lines)

    if fits([*names, *others]) or not all(fits([*names, column]) for column in others):
        return [[*names, *others]]
    blocks = [names]
    for column in others:
        if fits([*blocks[-1], column]):
            blocks[-1] = [*blocks[-1], column]
        else:
            blocks.append([*names, column])
    return blocks
