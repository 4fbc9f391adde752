from __future__ import annotations

import pytest

from bench.chunking.budgets import BudgetResult, estimate_errors


@pytest.mark.parametrize(
    ("slowdown", "estimated_slowdown", "expected"),
    [
        pytest.param(2.0, 2.5, {("gpt", 0.5): 0.25}, id="estimated dearer"),
        pytest.param(2.0, 1.0, {("gpt", 0.5): -0.5}, id="estimated cheaper"),
        pytest.param(None, 1.0, {}, id="not timed"),
        pytest.param(None, None, {}, id="refused"),
    ],
)
def test_the_error_of_an_estimate_is_of_what_was_timed(
    slowdown: float | None, estimated_slowdown: float | None, expected: dict[tuple[str, float], float]
) -> None:
    row = BudgetResult(
        model="gpt",
        fraction=0.5,
        unchunked_bytes=100,
        budget_bytes=50,
        minimum_bytes=40,
        planning_s=1.0,
        slowdown=slowdown,
        estimated_slowdown=estimated_slowdown,
    )
    assert estimate_errors([row]) == expected
