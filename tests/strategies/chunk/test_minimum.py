"""`chunk=minimum`: the smallest plan."""

from __future__ import annotations

from strategies.chunk import ChunkPlan
from strategies.chunk.minimum import Minimum
from tests.strategies.chunk.models import built


def test_it_is_the_plan_with_the_smallest_peak() -> None:
    model, inputs = built("pictures")
    plan = ChunkPlan.make(model, inputs, training=True)
    planned = Minimum().apply(model, inputs)
    seen = Minimum().observe(planned).plan
    assert seen is not None
    assert seen["chunk"] == plan.to_dict()
    assert plan.predicted_peak_bytes == plan.minimum_feasible_bytes < plan.unchunked_peak_bytes
