"""Entries as rows of a test."""

from __future__ import annotations

from typing import Any

import pytest

_COMPILING = ("n25", "n26")
_REPEATING = ("n45", "n57", "n59", "n63", "c25")
"""What the check names the same causes of as of an entry that runs: n44, n56, n03, n33, c24."""
OF_ONE_CAUSE = (
    *("n03", "n08", "n16", "n19", "n20", "n27", "n29", "n36", "n39", "n47", "n48", "n50", "n52", "n53"),
    *("n60", "n61", "n62", "n64", "n65", "n66"),
    *(
        "c03",
        "c04",
        "c06",
        "c07",
        "c08",
        "c10",
        "c12",
        "c13",
        "c16",
        "c18",
        "c19",
        "c22",
        "c23",
        "c24",
        "c25",
    ),
    *("c28", "c30", "c32"),
)
"""Defects whose cause the check names of a cheaper entry too, and controls of the kind of another one."""


def rows_of(*lists: list[str], also: tuple[str, ...] = ()) -> list[Any]:
    """Return a row for each name; those that compile or repeat another one run in `make matrix` only.

    Args:
        lists: names of entries.
        also: how names of others start that run there only.
    """
    left_out = _COMPILING + _REPEATING + also
    return [
        pytest.param(name, marks=pytest.mark.matrix if name.startswith(left_out) else ())
        for names in lists
        for name in names
    ]
