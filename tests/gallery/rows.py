"""Entries as rows of a test."""

from __future__ import annotations

from typing import Any

import pytest

_COMPILING = ("n25", "n26")


def rows_of(*lists: list[str]) -> list[Any]:
    """Return a row for each name; those that compile take seconds and run in `make matrix` only."""
    return [
        pytest.param(name, marks=pytest.mark.matrix if name.startswith(_COMPILING) else ())
        for names in lists
        for name in names
    ]
