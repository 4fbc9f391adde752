"""Entries as rows of a test."""

from __future__ import annotations

from typing import Any

import pytest

_COMPILING = ("n25", "n26")
_REPEATING = ("n45", "n57", "n59", "n63", "c25")
"""What the check names the same causes of as of an entry that runs: n44, n56, n03, n33, c24."""


def rows_of(*lists: list[str]) -> list[Any]:
    """Return a row for each name; those that compile or repeat another one run in `make matrix` only."""
    return [
        pytest.param(name, marks=pytest.mark.matrix if name.startswith(_COMPILING + _REPEATING) else ())
        for names in lists
        for name in names
    ]
