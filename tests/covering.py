"""Matrices of tests: rows that put every two values together run by default, the others by `make matrix`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from _pytest.mark import ParameterSet

from bench.covering import Row, covering


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
