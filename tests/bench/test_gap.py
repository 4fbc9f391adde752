"""The summary of plans between their bounds."""

from __future__ import annotations

import pytest

from bench.budget.gap import Planned, summary_of


def planned(plan: float, gap: float, *, is_by_blocks: bool = True) -> Planned:
    return Planned(
        network="",
        share=0.5,
        is_by_blocks=is_by_blocks,
        plan_percent=plan,
        best_percent=plan,
        autograd_percent=plan - gap,
        any_percent=0.0,
        gap=gap,
    )


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        ([], (0, 0, 0, 0, 0)),
        ([planned(0.0, 0.0)], (1, 1, 0, 0, 0)),
        ([planned(2.0, 1e-6)], (1, 0, 1, 0, 0)),
        ([planned(2.0, 1.0)], (1, 0, 0, 1, 0)),
        ([planned(2.0, 1.1)], (1, 0, 0, 0, 1)),
        ([planned(9.0, 5.0, is_by_blocks=False), planned(9.0, 5.0), planned(0.0, 0.0)], (2, 1, 0, 0, 1)),
    ],
)
def test_the_summary_counts_each_budget_of_blocks_alone_once(
    found: list[Planned], counts: tuple[int, ...]
) -> None:
    summary = summary_of(found)
    kinds = summary.free, summary.at_bound, summary.near, len(summary.above)
    assert (summary.budgets, *kinds) == counts
    assert sum(kinds) == summary.budgets
