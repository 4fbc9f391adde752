"""What tests of strategies do without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from strategies.budget.planning.autograd_bound import AutogradBound

HERE = Path(__file__).parent
PLANS_ALONE = ("ac", "budget/eager", "budget/export")
"""Folders whose tests make plans, and look at none of their bounds."""


@pytest.fixture(scope="module", autouse=True)
def bound_that_nobody_reads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out the bound by several moments together: it takes long, and decides nothing of a plan."""
    if not any(request.path.is_relative_to(HERE / folder) for folder in PLANS_ALONE):
        yield
        return
    with mock.patch.object(AutogradBound, "jointly", return_value=0.0):
        yield
