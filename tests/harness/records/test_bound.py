"""The distance of a variant from its bound, over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.records.bound import Bound, MeasuredBound, contradiction, merge_bounds

RANK = MeasuredBound(
    peak_bytes=100,
    host_peak_bytes=7,
    recomputed_flops=300,
    step_flops=1000,
    lower_bound_extra_flops=100,
    lower_bound_autograd_flops=250,
)
BOUND = Bound(
    peak_bytes=100,
    host_peak_bytes=7,
    lower_bound_extra_flops=100,
    lower_bound_autograd_flops=250,
    points_above=20.0,
    points_above_autograd=5.0,
)


def test_the_rank_with_the_highest_peak_counts() -> None:
    lower = replace(RANK, peak_bytes=99, recomputed_flops=900)
    assert merge_bounds([lower, RANK, lower]) == BOUND


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        pytest.param(RANK, None, id="above both bounds"),
        pytest.param(replace(RANK, lower_bound_autograd_flops=None), None, id="one bound alone"),
        pytest.param(
            replace(RANK, lower_bound_extra_flops=310),
            "it runs 1.00 % of the step's FLOPs less again than any schedule: it runs other operators than",
            id="below any schedule",
        ),
        pytest.param(
            replace(RANK, lower_bound_autograd_flops=320),
            "it is 2.00 % below the bound of backward in the plain step's order: it runs another",
            id="below those in order",
        ),
        pytest.param(
            replace(RANK, lower_bound_extra_flops=None),
            "no schedule of the plain step's operators has its peak: it runs other operators",
            id="no schedule at all",
        ),
    ],
)
def test_a_variant_below_its_bound_is_said(rank: MeasuredBound, said: str | None) -> None:
    found = contradiction([rank], merge_bounds([rank]))
    assert found is None if said is None else (found or "").startswith(said)


def test_nothing_is_said_of_what_has_no_bound() -> None:
    assert contradiction([], None) is None
