"""A point measures a plan: bytes as predicted and within the budget, results as the plain model has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.chunking import chunk_points
from bench.chunking.chunk_points import Point, Stack

SMALL = Point(
    name="small attention",
    make=lambda: Stack(1, 16, 2),
    sample=chunk_points._values(64, 16),
    fraction=0.6,
    allowed_slowdown=None,
)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_a_point_within_its_budget(*, training: bool) -> None:
    row = chunk_points._row(SMALL, training=training)
    assert row.predicted_bytes is not None
    assert row.measured_bytes is not None
    assert row.measured_bytes <= row.predicted_bytes <= SMALL.fraction * row.unchunked_bytes
    assert row.relative_difference is not None
    assert row.relative_difference < 1e-5
    assert (row.above_gradients is not None) is training


def test_a_budget_that_no_plan_fits_is_refused() -> None:
    row = chunk_points._row(replace(SMALL, fraction=0.001), training=False)
    assert (row.predicted_bytes, row.measured_bytes, row.slowdown) == (None, None, None)
    assert row.minimum_bytes > 0.001 * row.unchunked_bytes
